"""Are these scores right? Retrain without what they name, and see.

``subsets`` → ``retrain`` → ``lds`` asks how well sums of scores rank models of random subsets;
``brittleness`` and ``removal_curve`` remove what the scores call important; ``mislabelled_auc``
asks whether they find wrong labels; masks of ``leave_one_out`` turn the first chain into a test
against leaving out single samples.
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
