"""Evaluation of scores: by retraining without the samples that they name, and by known answers.

``subsets`` → ``retrain`` → ``lds`` measures how well sums of scores rank models of random subsets;
``removal_curve`` removes the samples that the scores call important, and ``leave_group_out`` each
group of samples. With the masks of ``leave_one_out``, the first chain compares scores with the
effect of leaving out single samples.

Nothing is retrained by the others: ``cross_validate`` predicts checkpoints that were left out, and
``mislabelled_curve`` measures whether scores find wrong labels.

``train_on_halves`` trains checkpoints for ``cross_validate``. ``reliability`` says what more
checkpoints would gain. ``metric`` computes a metric of outputs. ``baselines`` makes simple scores,
which tell in all of these whether attribution was needed.
"""

from trakdask.attribution.metrics import metric
from trakdask.evaluate.baselines import baselines
from trakdask.evaluate.cross_validation import cross_validate
from trakdask.evaluate.datamodeling import lds, leave_one_out, subsets
from trakdask.evaluate.detection import mislabelled_curve
from trakdask.evaluate.groups import leave_group_out
from trakdask.evaluate.halves import train_on_halves
from trakdask.evaluate.noise import reliability
from trakdask.evaluate.removal import removal_curve
from trakdask.evaluate.retraining import retrain

__all__ = [
    "baselines",
    "cross_validate",
    "lds",
    "leave_group_out",
    "leave_one_out",
    "metric",
    "mislabelled_curve",
    "reliability",
    "removal_curve",
    "retrain",
    "subsets",
    "train_on_halves",
]


def __dir__() -> list[str]:
    return __all__
