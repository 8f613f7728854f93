"""Attribution: from features to the gram matrix, its damping, scores and rankings."""

from trakdask.attribution.components import principal_components
from trakdask.attribution.curvatures import curvature, wrong_classes
from trakdask.attribution.estimators import Absolute
from trakdask.attribution.grams import damping, gram
from trakdask.attribution.groups import combine
from trakdask.attribution.part_scores import score_parts
from trakdask.attribution.ranking import top_k
from trakdask.attribution.scores import group_score, score, self_influence

__all__ = [
    "Absolute",
    "combine",
    "curvature",
    "damping",
    "gram",
    "group_score",
    "principal_components",
    "score",
    "score_parts",
    "self_influence",
    "top_k",
    "wrong_classes",
]
