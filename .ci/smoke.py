"""Attribute a small model with what is installed: features, a store, scores, a ranking, parquet."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import torch

import trakdask as td

random = np.random.default_rng(0)
x = random.standard_normal((120, 6)).astype("f4")
coords = {"label": (x[:, 0] > 0).astype(int), "source": random.choice(["web", "book"], 120)}
samples = td.from_arrays({"image": x}, coords=coords, chunks=40)


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Return the weights of an untrained model."""
    torch.manual_seed(seed)
    return torch.nn.Linear(6, 2).state_dict()


def main() -> None:
    """Run everything once, in a new folder."""
    model = td.Model(torch.nn.Linear(6, 2), [weights(seed) for seed in range(3)])
    with tempfile.TemporaryDirectory() as folder:
        lazy = td.featurize(samples, model, projector=td.Rademacher(16))
        features = td.save(lazy, f"{folder}/train.zarr", progress=False)
        scores = td.score(features, features.isel(sample=slice(0, 5)))
        td.to_parquet(td.top_k(scores, 3, where=scores.source == "web"), f"{folder}/top.parquet")
        table = pd.read_parquet(Path(folder) / "top.parquet")
        dense = scores.compute()
        best = dense.where(dense.source == "web").argmax("sample").values
        assert table.position[table["rank"] == 0].tolist() == best.tolist()
        assert set(table.source) == {"web"}
        assert td.verify(f"{folder}/train.zarr", checksums=True).empty
    print(f"trakdask {td.__version__} from {Path(td.__file__).parent} works")


if __name__ == "__main__":
    main()
