"""Attribution: from features to the gram matrix, its damping, scores and rankings."""

from trakdask.attribution.ranking import top_k
from trakdask.attribution.regularization import Absolute, damping
from trakdask.attribution.scores import gram, group_score, score, self_influence

__all__ = ["Absolute", "damping", "gram", "group_score", "score", "self_influence", "top_k"]
