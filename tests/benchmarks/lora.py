"""One look at a task that no constant was chosen on: adapters of a language model (LoRA).

    python tests/benchmarks/lora.py --cache demo-output/quality    # ten minutes

A language model is trained on two of the five packages, and adapted to the three others by matrices
of rank 8 beside each linear layer of its blocks. Truth is trained on 60 halves, with two seeds.
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path

import dask
import numpy as np
import torch
import xarray as xr
from _machine import parser_of
from _quality_tasks import Data, Language, LanguageModel, members, text
from _quality_truth import checkpoints, retrain
from torch import Tensor, nn

import trakdask as td

OLD = 2  # packages that the base model has seen
CACHE = Path("demo-output/quality")


class Adapted(nn.Module):
    """A linear layer with a frozen weight, and a product of two thin matrices beside it."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.lora_b(self.lora_a(x))


@functools.cache
def corpus(is_old: bool) -> Data:
    """Return snippets of the packages that the base model has seen, or of the others."""
    train, targets = ([x[(y < OLD) == is_old] for x in (tokens, y)] for tokens, y in text())
    if is_old:
        targets = [text()[1][0][text()[1][1] >= OLD], text()[1][1][text()[1][1] >= OLD]]
    return tuple(train), tuple(targets)


BASE = Language("lora2-base", LanguageModel, functools.partial(corpus, True), 12, 1)


@functools.cache
def base_state() -> dict[str, Tensor]:
    return torch.load(checkpoints(BASE, CACHE, 1)[0])


def build() -> nn.Module:
    net = LanguageModel()
    net.load_state_dict(base_state())
    net.requires_grad_(False)
    for block in net.blocks:
        for name in ("qkv", "out", "up", "down"):
            setattr(block, name, Adapted(getattr(block, name)))
    return net


LORA = Language("lora2", build, functools.partial(corpus, False), 20, 60, 1e-2)


def main() -> None:
    global CACHE
    CACHE = parser_of(__doc__, cache=CACHE).parse_args().cache
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dask.config.set(scheduler="synchronous")
    n = len(LORA.data()[0][0])
    print(n, "snippets,", len(LORA.data()[1][0]), "targets: LDS by default λ")
    masks = np.stack([members(subset, n) for subset in range(LORA.n_subsets)])
    drawn = xr.DataArray(masks, dims=("subset", "sample"))
    found = retrain(LORA, CACHE, 2).astype(float)
    outputs = xr.DataArray(found, dims=("subset", "seed", "target"))
    files, samples = checkpoints(LORA, CACHE, 3), [LORA.samples(part) for part in range(2)]
    for k in (1, 3):
        model = td.Model(build, files[:k], LORA.task, parameters="*lora_*")
        fit = functools.partial(td.fit, samples[0], model, progress=False)
        made = {
            "td.fit": fit(),
            "td.fit(weights=False)": fit(weights=False),
            "td.fit(curvature=False)": fit(curvature=False),
            "SJLT(2048)": td.SJLT(2048),
        }
        for name, projector in made.items():
            features = [td.featurize(each, model, projector).compute() for each in samples]
            lds = td.evaluate.lds(td.score(*features), drawn, outputs, resamples=200)
            low, high = lds.interval.values
            print(f"{k}  {name:24} {float(lds.lds_mean):.3f} [{low:.3f}, {high:.3f}]", flush=True)


if __name__ == "__main__":
    main()
