"""Example data and models that fit on a laptop, and a trainer of small classifiers."""

from trakdask.examples.handwritten_digits import (
    digits,
    digits_arrays,
    digits_checkpoints,
    digits_cnn,
    digits_mlp,
)
from trakdask.examples.training import classifier_accuracy, train_classifier

__all__ = [
    "classifier_accuracy",
    "digits",
    "digits_arrays",
    "digits_checkpoints",
    "digits_cnn",
    "digits_mlp",
    "train_classifier",
]


def __dir__() -> list[str]:
    return __all__
