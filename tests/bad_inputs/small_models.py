"""Small models, samples and calls of featurize that the tables of bad inputs share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

import trakdask as td

NET = nn.Linear(4, 3)


class After(nn.Module):
    """A linear layer from 4 to 3, and what becomes of its outputs."""

    def __init__(self, after: Callable[[Tensor], Any] = lambda y: y) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 3)
        self.after = after

    def forward(self, x: Tensor) -> Any:
        return self.after(self.head(x))


class Language(nn.Module):
    """A language model of 7 tokens, and positions up to 5."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(7, 4), nn.Embedding(5, 4)
        self.head = nn.Linear(4, 7)

    def forward(self, input_ids: Tensor) -> Tensor:
        place = torch.arange(input_ids.shape[1])[None]
        return self.head(self.wte(input_ids) + self.wpe(place))


class TwoTowers(nn.Module):
    def __init__(self, rows: slice = slice(None)) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.rows = rows

    def forward(self, image: Tensor, text: Tensor) -> Any:
        return self.head(image)[self.rows], self.head(text)[self.rows], torch.tensor(10.0)


def data(n: int = 4, **changed: Any) -> xr.Dataset:
    x = np.random.default_rng(0).standard_normal((n, 4)).astype("f4")
    return td.from_arrays({"image": x, "label": np.arange(n) % 3} | changed)


@functools.cache
def fine() -> td.Model:
    return td.Model(After())


def options(samples: Any = None, **given: Any) -> Callable[[Path], object]:
    return lambda _: td.featurize(data() if samples is None else samples, fine(), **given)


def computed(
    module: nn.Module,
    samples: xr.Dataset | None = None,
    task: Any = "image_classification",
    **how: Any,
) -> Callable[[Path], object]:
    def call(_: Path) -> object:
        lazy = td.featurize(
            data() if samples is None else samples,
            td.Model(module, task=task),
            projector=td.Identity(),
            **how,
        )
        return lazy.compute(scheduler="sync")

    return call


def labelled(
    label: Any, module: nn.Module | None = None, **options: Any
) -> Callable[[Path], object]:
    return computed(module or After(), data(label=np.asarray(label)), **options)


def tokens(ids: Any, **labels: Any) -> xr.Dataset:
    arrays = {"input_ids": np.asarray(ids)} | {n: np.asarray(v) for n, v in labels.items()}
    return td.from_arrays(arrays)


def language(samples: xr.Dataset, **how: Any) -> Callable[[Path], object]:
    task = td.tasks.CausalLM("input_ids", **how.pop("task", {}))
    return computed(Language(), samples, task, **how)


def pairs(**changed: Any) -> xr.Dataset:
    x = np.random.default_rng(0).standard_normal((4, 4)).astype("f4")
    return td.from_arrays({"image": x, "text": x} | changed)


def drawn(n: int = 5, width: int = 3) -> dict[str, tuple[Tensor, Tensor]]:
    return {"0": (torch.ones(n, width), torch.ones(n, width))}


class Mean:
    """A task that forgets the axis of samples."""

    def output(self, forward: Any, batch: Any) -> Tensor:
        return forward(batch["image"]).mean()

    def out_to_loss(self, forward: Any, batch: Any) -> Tensor:
        return forward(batch["image"]).mean()


class Detached:
    """A task whose output autograd cannot follow."""

    @torch.no_grad()
    def output(self, forward: Any, batch: Any) -> Tensor:
        return forward(batch["image"])[:, 0]

    def out_to_loss(self, forward: Any, batch: Any) -> Tensor:
        return forward(batch["image"])[:, 0]


class AllColumns(Detached):
    """A task that returns a number for each column."""

    def __init__(self, n: int) -> None:
        self.n = n

    def output(self, forward: Any, batch: Any) -> Tensor:
        return forward(batch["image"])[:, : self.n]


class OnlyOutput:
    def output(self, forward: Any, batch: Any) -> Tensor:
        return forward(batch["image"])[:, 0]


BIG = [0, 1, 7, 2]
IDS = np.array([[1, 2, 3], [4, 5, 6], [1, 2, 9], [0, 1, 2]])
X = {"image": np.ones((4, 4), "f4"), "label": np.zeros(4, int)}
NAN = X | {"image": np.array([[1, 1, 1, 1], [np.nan, 1, 1, 1]] * 2, "f4")}
