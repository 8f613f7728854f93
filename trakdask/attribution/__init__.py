"""Attribution: from features to the gram matrix, its damping, scores and rankings."""

from trakdask.attribution.components import principal_components as principal_components
from trakdask.attribution.curvatures import curvature as curvature
from trakdask.attribution.estimators import Absolute as Absolute
from trakdask.attribution.grams import damping as damping
from trakdask.attribution.grams import gram as gram
from trakdask.attribution.groups import combine as combine
from trakdask.attribution.part_scores import score_parts as score_parts
from trakdask.attribution.ranking import top_k as top_k
from trakdask.attribution.scores import group_score as group_score
from trakdask.attribution.scores import score as score
from trakdask.attribution.scores import self_influence as self_influence
