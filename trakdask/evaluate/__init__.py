"""Evaluation of scores: models are retrained without the samples that the scores name.

``subsets`` → ``retrain`` → ``lds`` measures how well sums of scores rank models of random subsets;
``brittleness`` and ``removal_curve`` remove the samples that the scores call important;
``mislabelled_auc`` measures whether scores find wrong labels. With the masks of ``leave_one_out``,
the first chain compares scores with the effect of leaving out single samples.
"""

from trakdask.evaluate.datamodeling import lds
from trakdask.evaluate.masks import leave_one_out, subsets
from trakdask.evaluate.mislabelled import mislabelled_auc
from trakdask.evaluate.removal import brittleness, removal_curve
from trakdask.evaluate.retraining import retrain

__all__ = [
    "brittleness",
    "lds",
    "leave_one_out",
    "mislabelled_auc",
    "removal_curve",
    "retrain",
    "subsets",
]


def __dir__() -> list[str]:
    return __all__
