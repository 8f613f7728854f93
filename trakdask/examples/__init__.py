"""Example data and models that fit on a laptop, and a trainer of small classifiers."""

from trakdask.examples.classifiers import (
    classifier_accuracy,
    digits_checkpoints,
    digits_cnn,
    digits_halves,
    digits_mlp,
    fit_mnist_cnn,
    mnist_checkpoints,
    mnist_cnn,
    train_classifier,
)
from trakdask.examples.images import digits, digits_arrays, mnist

__all__ = [
    "classifier_accuracy",
    "digits",
    "digits_arrays",
    "digits_checkpoints",
    "digits_cnn",
    "digits_halves",
    "digits_mlp",
    "fit_mnist_cnn",
    "mnist",
    "mnist_checkpoints",
    "mnist_cnn",
    "train_classifier",
]


def __dir__() -> list[str]:
    return __all__
