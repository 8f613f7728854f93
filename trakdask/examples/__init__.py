"""Example data and models that fit on a laptop, and a trainer of small classifiers."""

from trakdask.examples.classifiers import (
    digits_checkpoints,
    digits_cnn,
    digits_halves,
    digits_mlp,
    fit_mnist_cnn,
    iris_features,
    mnist_cnn,
    train_classifier,
)
from trakdask.examples.images import digits, mnist

__all__ = [
    "digits",
    "digits_checkpoints",
    "digits_cnn",
    "digits_halves",
    "digits_mlp",
    "fit_mnist_cnn",
    "iris_features",
    "mnist",
    "mnist_cnn",
    "train_classifier",
]


def __dir__() -> list[str]:
    return __all__
