"""Tasks of the quality benchmark: data, model and training, each a pure function of its seeds."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import xarray as xr
from _models import Block, conv
from numpy.typing import NDArray
from torch import Tensor, nn

import trakdask as td
from trakdask import examples

N_CLASSES = 10
N_WORDS = 800  # with the unknown word, number 0
SNIPPET = 32  # words
INIT = 0.02  # of GPT-2; torch's own 1 makes outputs depend on the draw more than on the data
N_PACKAGES = 5  # asyncio, email, multiprocessing, unittest, xml
TEXT = Path(__file__).parent / "results" / "quality" / "text.npz"

Inputs = NDArray[Any]
Labels = NDArray[Any]
Mask = NDArray[np.bool_]
Data = tuple[tuple[Inputs, Labels], tuple[Inputs, Labels]]


# --- models ---------------------------------------------------------------------------------------


def cnn() -> nn.Module:
    """Convolutions with GroupNorm, 41k parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.GroupNorm(8, 32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 68),
        nn.ReLU(),
        nn.Linear(68, N_CLASSES),
    )


class ResNet(nn.Module):
    """Skip connections and BatchNorm, 63k parameters."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.stem = conv(1, width)
        self.first = nn.Sequential(conv(width, width), conv(width, width))
        self.middle = conv(width, 2 * width, pool=True)
        self.second = nn.Sequential(conv(2 * width, 2 * width), conv(2 * width, 2 * width))
        self.head = nn.Linear(2 * width, N_CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        x = self.middle(x + self.first(x))
        return self.head((x + self.second(x)).mean((2, 3)))


class Transformer(nn.Module):
    """Two layers of GPT-2's kind, mean pooling, 73k parameters."""

    def __init__(self, width: int = 40) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(N_WORDS, width), nn.Embedding(SNIPPET, width)
        for embedding in (self.words, self.positions):
            nn.init.normal_(embedding.weight, std=INIT)
        self.blocks = nn.Sequential(Block(width, 4), Block(width, 4))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, N_PACKAGES)

    def forward(self, tokens: Tensor) -> Tensor:
        # Expanded, so that every sample has its own positions and hooks can tell samples apart.
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        x = self.blocks(self.words(tokens) + self.positions(positions))
        return self.head(self.norm(x).mean(1))


class LanguageModel(Transformer):
    """The transformer of the classification task, with a logit for every next word."""

    def __init__(self, width: int = 40) -> None:
        super().__init__(width)
        self.head = nn.Linear(width, N_WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        x = self.blocks(self.words(tokens) + self.positions(positions))
        return self.head(self.norm(x))


def perceptron(
    widths: tuple[int, ...], activation: Callable[[], nn.Module] = nn.ReLU
) -> Callable[[], nn.Module]:
    """Return what builds a perceptron of these widths."""

    def build() -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        for n_in, n_out in itertools.pairwise(widths):
            layers += [nn.Linear(n_in, n_out), activation()]
        return nn.Sequential(*layers[:-1])

    return build


# --- data -----------------------------------------------------------------------------------------


def digits(wrong: float = 0.0) -> Data:
    """Split digits into 1000 to train on, a share of them labelled wrongly, and 150 targets."""
    (images, labels), targets = (
        (ds.image.values, ds.label.values) for ds in examples.digits(n_target=150)
    )
    images, labels = images[:1000], labels[:1000].copy()
    rng = np.random.default_rng(0)
    chosen = rng.permutation(len(labels))[: round(wrong * len(labels))]
    labels[chosen] = (labels[chosen] + rng.integers(1, N_CLASSES, len(chosen))) % N_CLASSES
    return (images, labels), targets


def cancer() -> Data:
    """Split the 569 tumours into 429 to train on, standardised, and 140 targets."""
    from sklearn.datasets import load_breast_cancer  # optional, as in trakdask.examples

    return split(*load_breast_cancer(return_X_y=True), n_target=140)


def split(x: NDArray[Any], y: NDArray[Any], n_target: int) -> Data:
    """Split rows at random; mean and deviation of the training rows scale all, but no classes."""
    order = np.random.default_rng(0).permutation(len(y))
    train, target = order[n_target:], order[:n_target]

    def scaled(a: NDArray[Any]) -> NDArray[Any]:
        return ((a - a[train].mean(axis=0)) / a[train].std(axis=0)).astype(np.float32)

    x, y = scaled(x), scaled(y) if y.dtype.kind == "f" else y.astype(np.int64)
    return (x[train], y[train]), (x[target], y[target])


def diabetes() -> Data:
    """Split the 442 patients of scikit-learn into 342 to train on and 100 targets."""
    from sklearn.datasets import load_diabetes  # optional, as in trakdask.examples

    return split(*load_diabetes(return_X_y=True), n_target=100)


def surface() -> Data:
    """Draw a function of six numbers with interactions, steps and noise."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (1150, 6))
    y = np.sin(4 * x[:, 0] * x[:, 1]) + np.abs(x[:, 2] - x[:, 3]) + (x[:, 4] > 0) * x[:, 5]
    return split(x, y + 0.1 * rng.standard_normal(len(y)), n_target=150)


def text() -> Data:
    """Snippets of Python's source, 1000 to train on and 150 targets: which package is it from?

    They are kept as numbers of words, because another version of Python has other source text.
    """
    with np.load(TEXT) as stored:
        tokens, labels = stored["tokens"].astype(np.int64), stored["labels"].astype(np.int64)
    return (tokens[:1000], labels[:1000]), (tokens[1000:], labels[1000:])


# --- tasks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """Data, a model, its training, and how many halves it is retrained on."""

    name: str
    build: Callable[[], nn.Module]
    data: Callable[[], Data]
    epochs: int
    n_subsets: int
    lr: float = 3e-3
    batch_size: int = 64

    task: ClassVar[str | td.tasks.Task] = "image_classification"

    def samples(self, part: int) -> xr.Dataset:
        """Return the training samples (0) or the targets (1), named as the task reads them."""
        inputs, labels = self.data()[part]
        return td.from_arrays({"image": inputs}, coords={"label": labels}, chunks=512)

    def train(
        self, mask: Mask | None, seed: int, *, left_in: Mask | None = None
    ) -> dict[str, Tensor]:
        """Train on the chosen samples, or on all.

        Samples that are not ``left_in`` are taken out of the batches, which stay as they are
        otherwise. As models of one seed then differ only by what was left out, their ranks need
        fewer seeds than the ranks of models with other batches.
        """
        rows = slice(None) if mask is None else mask
        inputs, labels = (torch.from_numpy(array[rows]) for array in self.data()[0])
        n = len(inputs)
        is_in = torch.ones(n, dtype=torch.bool) if left_in is None else torch.from_numpy(left_in)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.build().train()
            optimizer, schedule = self.optimizer(model, self.epochs * -(-n // self.batch_size))
            for _ in range(self.epochs):
                for batch in torch.randperm(n).split(self.batch_size):
                    some = batch[is_in[batch]]
                    optimizer.zero_grad()
                    torch.autograd.backward(self.loss(model, inputs[some], labels[some]))
                    optimizer.step()
                    schedule.step()
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    def optimizer(self, model: nn.Module, n_steps: int) -> tuple[Any, Any]:
        """Return the optimizer, and the schedule of its learning rate."""
        optimizer = torch.optim.Adam(model.parameters(), lr=self.lr)
        cycle = torch.optim.lr_scheduler.OneCycleLR
        return optimizer, cycle(optimizer, max_lr=self.lr, total_steps=n_steps)

    def loss(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        return nn.functional.cross_entropy(model(inputs), labels)

    def outputs(self, state: dict[str, Tensor]) -> NDArray[np.float64]:
        """f = log(p / (1 - p)) of every target, in float64: what is attributed."""
        logits, column = self.applied(state), torch.from_numpy(self.data()[1][1])[:, None]
        others = logits.scatter(1, column, -torch.inf)
        return (logits.gather(1, column)[:, 0] - others.logsumexp(1)).numpy()

    def applied(self, state: dict[str, Tensor]) -> Tensor:
        """Return what the model makes of the targets, in float64."""
        model = self.build().eval()
        model.load_state_dict(state)
        with torch.no_grad():
            return model(torch.from_numpy(self.data()[1][0])).double()

    def digest(self) -> str:
        """Name data, architecture and settings: truth of another digest is of another task."""
        made_of = hashlib.sha256()
        for array in (array for part in self.data() for array in part):
            made_of.update(np.ascontiguousarray(array).tobytes())
        settings = [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)]
        plain = [(name, value) for name, value in settings if isinstance(value, (int, float))]
        plain = [(name, value) for name, value in plain if name != "n_subsets"]
        made_of.update(f"{self.build()}{plain}".encode())
        return made_of.hexdigest()[:12]


@dataclass(frozen=True)
class Regression(Subject):
    """One number per row, with half the squared error; the output is the prediction."""

    task: ClassVar[str | td.tasks.Task] = "regression"

    def samples(self, part: int) -> xr.Dataset:
        rows, values = self.data()[part]
        return td.from_arrays({"x": rows, "y": values}, chunks=512)

    def loss(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        return (model(inputs)[:, 0] - labels).square().mean() / 2

    def outputs(self, state: dict[str, Tensor]) -> NDArray[np.float64]:
        return self.applied(state)[:, 0].numpy()


@dataclass(frozen=True)
class Language(Subject):
    """The next word; the output is the sum of the margins of a snippet's words."""

    task: ClassVar[str | td.tasks.Task] = td.tasks.CausalLM(inputs=("input_ids",), positional=True)

    def samples(self, part: int) -> xr.Dataset:
        tokens, package = self.data()[part]
        return td.from_arrays({"input_ids": tokens}, coords={"package": package}, chunks=512)

    def loss(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        logits = model(inputs)[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), inputs[:, 1:].flatten())

    def outputs(self, state: dict[str, Tensor]) -> NDArray[np.float64]:
        tokens = torch.from_numpy(self.data()[1][0])
        log_p = self.applied(state)[:, :-1].log_softmax(2)
        log_p = log_p.gather(2, tokens[:, 1:, None])[:, :, 0]
        return (log_p - torch.log(-torch.expm1(log_p))).sum(1).numpy()


def members(subset: int, n_train: int) -> Mask:
    """Draw half of the training samples."""
    chosen = np.random.default_rng([subset, n_train]).permutation(n_train)[: n_train // 2]
    mask = np.zeros(n_train, dtype=bool)
    mask[chosen] = True
    return mask


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject("mlp", examples.digits_mlp, functools.cache(digits), 30, 300),
        Subject("cnn", cnn, functools.cache(digits), 20, 200),
        Subject("resnet", ResNet, functools.cache(digits), 20, 120),
        Subject("transformer", Transformer, functools.cache(text), 12, 150),
        Subject("cancer", perceptron((30, 64, 32, 2)), functools.cache(cancer), 15, 300),
        Subject("noisy", examples.digits_mlp, functools.partial(digits, wrong=0.1), 30, 200),
        Subject("early", perceptron((64, 128, 64, 10), nn.Tanh), functools.cache(digits), 6, 300),
        Regression(
            "diabetes", perceptron((10, 64, 64, 1)), functools.cache(diabetes), 40, 100,
            batch_size=32,
        ),
        Regression("surface", perceptron((6, 64, 64, 1)), functools.cache(surface), 60, 100),
        Language("language", LanguageModel, functools.cache(text), 8, 100),
    )
}  # fmt: skip
