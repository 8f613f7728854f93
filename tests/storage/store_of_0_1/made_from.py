"""What the example store of version 0.1 was made from: nothing here may change.

Ten samples in two parts, with coords that are text, numbers, and an input of the model (``label``);
a linear model at two checkpoints whose weights are written out.
"""

from __future__ import annotations

import numpy as np
import torch
import xarray as xr

import trakdask as td


def features(start: int, stop: int) -> xr.Dataset:
    """Return lazy features of some of the samples."""
    rows = np.arange(start, stop)
    samples = td.from_arrays(
        {"image": (np.arange(40, dtype="f4").reshape(10, 4) % 7)[rows]},
        coords={
            "label": rows % 3,
            "number": rows,
            "year": 2000.0 + rows,
            "language": [("de", "en")[row % 2] for row in rows],
        },
        chunks=4,
    )
    weights = [
        {"weight": torch.arange(12.0).reshape(3, 4) * scale, "bias": torch.arange(3.0)}
        for scale in (0.125, -0.25)
    ]
    model = td.Model(
        torch.nn.Linear(4, 3), checkpoints=weights, task=td.tasks.ImageClassification()
    )
    return td.featurize(samples, model, projector=td.SJLT(8, seed=3))
