"""Tasks of the quality benchmark: data, model and training, each a pure function of its seeds."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import re
import sysconfig
from collections import Counter
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
PACKAGES = ("asyncio", "email", "multiprocessing", "unittest", "xml")
TEXT = Path(__file__).parent / "results" / "quality" / "text.npz"

Inputs = NDArray[Any]
Labels = NDArray[np.int64]
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
        self.head = nn.Linear(width, len(PACKAGES))

    def forward(self, tokens: Tensor) -> Tensor:
        # Expanded, so that every sample has its own positions and hooks can tell samples apart.
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        x = self.blocks(self.words(tokens) + self.positions(positions))
        return self.head(self.norm(x).mean(1))


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
    (images, labels), targets = examples.digits_arrays(n_target=150)
    images, labels = images[:1000], labels[:1000].copy()
    rng = np.random.default_rng(0)
    chosen = rng.permutation(len(labels))[: round(wrong * len(labels))]
    labels[chosen] = (labels[chosen] + rng.integers(1, N_CLASSES, len(chosen))) % N_CLASSES
    return (images, labels), targets


def cancer() -> Data:
    """Split the 569 tumours into 429 to train on, standardised, and 140 targets."""
    from sklearn.datasets import load_breast_cancer  # optional, as in trakdask.examples

    return standardised(load_breast_cancer(), n_target=140)


def standardised(table: Any, n_target: int) -> Data:
    """Split a table of scikit-learn at random; the training rows' mean and deviation scale all."""
    order = np.random.default_rng(0).permutation(len(table.target))
    train, target = order[n_target:], order[:n_target]
    mean, deviation = table.data[train].mean(axis=0), table.data[train].std(axis=0)
    rows = ((table.data - mean) / deviation).astype(np.float32)
    labels = table.target.astype(np.int64)
    return (rows[train], labels[train]), (rows[target], labels[target])


def text() -> Data:
    """Snippets of Python's source, 1000 to train on and 150 targets: which package is it from?"""
    if not TEXT.exists():
        write_text(TEXT)
    with np.load(TEXT) as stored:
        tokens, labels = stored["tokens"].astype(np.int64), stored["labels"].astype(np.int64)
    return (tokens[:1000], labels[:1000]), (tokens[1000:], labels[1000:])


def write_text(path: Path) -> None:
    """Keep the snippets as numbers: another version of Python has other source text."""
    per_package = 1150 // len(PACKAGES)
    words = [_words(package) for package in PACKAGES]
    rng = np.random.default_rng(0)
    snippets = [_snippets(found, per_package, rng) for found in words]
    common = Counter(word for one in snippets for snippet in one for word in snippet)
    number = {word: k for k, (word, _) in enumerate(common.most_common(N_WORDS - 1), start=1)}
    tokens = np.array([[number.get(w, 0) for w in s] for one in snippets for s in one])
    order = rng.permutation(len(tokens))
    labels = np.repeat(np.arange(len(PACKAGES)), per_package)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        path, tokens=tokens[order].astype(np.uint16), labels=labels[order].astype(np.uint8)
    )


def _words(package: str) -> list[str]:
    """Words of a package's modules in their order, without those that tell the package's name."""
    folder = Path(sysconfig.get_path("stdlib")) / package
    sources = (p.read_text("utf-8") for p in sorted(folder.rglob("*.py")) if "test" not in p.parts)
    found = re.findall(r"[A-Za-z][a-z]+|[A-Z]+", "\n".join(sources))
    return [word.lower() for word in found if package not in word.lower()]


def _snippets(words: list[str], n: int, rng: np.random.Generator) -> list[list[str]]:
    starts = rng.choice(len(words) // SNIPPET, size=n, replace=False) * SNIPPET
    return [words[start : start + SNIPPET] for start in starts]


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
    skill: ClassVar[str] = "accuracy"

    def samples(self, part: int) -> xr.Dataset:
        """Return the training samples (0) or the targets (1), named as the task reads them."""
        inputs, labels = self.data()[part]
        return td.from_arrays({"image": inputs}, coords={"label": labels}, chunks=512)

    def skill_of(self, state: dict[str, Tensor], part: int) -> float:
        """Return how good a model is, on training samples (0) or targets (1)."""
        return examples.classifier_accuracy(self.build, state, *self.data()[part])

    def train(self, mask: NDArray[np.bool_] | None, seed: int) -> dict[str, Tensor]:
        """Train on the chosen samples, or on all."""
        inputs, labels = self.data()[0]
        rows = slice(None) if mask is None else mask
        settings = {"epochs": self.epochs, "batch_size": self.batch_size, "lr": self.lr}
        return examples.train_classifier(
            self.build, inputs[rows], labels[rows], seed=seed, **settings
        )

    def outputs(self, state: dict[str, Tensor]) -> NDArray[np.float64]:
        """f = log(p / (1 - p)) of every target, in float64: what is attributed."""
        inputs, labels = self.data()[1]
        model = self.build().eval()
        model.load_state_dict(state)
        with torch.no_grad():
            logits = model(torch.from_numpy(inputs)).double()
        column = torch.from_numpy(labels)[:, None]
        others = logits.scatter(1, column, -torch.inf)
        return (logits.gather(1, column)[:, 0] - others.logsumexp(1)).numpy()

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


def members(subset: int, n_train: int) -> NDArray[np.bool_]:
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
    )
}
