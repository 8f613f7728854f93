"""Attribution: from features to the gram matrix, its damping, scores and rankings."""

from trakdask.attribution.duplicates import duplicates
from trakdask.attribution.estimators import GradCos, GradDot, RelatIF, TracIn
from trakdask.attribution.gauss_newton import Soft, Trak
from trakdask.attribution.grams import gram
from trakdask.attribution.groups import combine
from trakdask.attribution.metrics import metric
from trakdask.attribution.protocol import Absolute
from trakdask.attribution.ranking import top_k
from trakdask.attribution.regularization import damping
from trakdask.attribution.scores import group_score, score, self_influence

__all__ = [
    "Absolute",
    "GradCos",
    "GradDot",
    "RelatIF",
    "Soft",
    "TracIn",
    "Trak",
    "combine",
    "damping",
    "duplicates",
    "gram",
    "group_score",
    "metric",
    "score",
    "self_influence",
    "top_k",
]
