"""Bad inputs of projectors and of plan."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
import xarray as xr

import trakdask as td
from tests.bad_inputs.bad_input import BadInput, one_test, row
from trakdask.projection import FastJL, Projector
from trakdask.provenance import as_values


@functools.cache
def samples() -> xr.Dataset:
    arrays = {"x": np.zeros((10**6, 1), "f4"), "y": np.zeros(10**6, "f4")}
    return td.from_arrays(arrays, chunks=10**6)


@functools.cache
def model(width: int = 1) -> td.Model:
    return td.Model(torch.nn.Linear(width, width), task="regression")


@functools.cache
def features() -> xr.Dataset:
    return td.featurize(samples().isel(sample=slice(8)), model(), projector=td.SJLT(8))


def featurize(projector: Projector, width: int = 1) -> xr.Dataset:
    return td.featurize(samples(), model(width), projector=projector)


def rows(
    function: str, *cases: tuple[Callable[[], object], type[Exception], list[str]]
) -> list[BadInput]:
    return [row(function, f"{i} {words}", *case, *words) for i, (*case, words) in enumerate(cases)]


PROJECTORS = [
    *rows(
        "Rademacher",
        *((lambda bad=bad: td.Rademacher(bad), ValueError, ["proj_dim", str(bad)]) for bad in (0, 2**32)),  # type: ignore[misc]
        (lambda: td.Rademacher(seed=-1), ValueError, ["seed", "-1"]),
        (lambda: td.Rademacher(arithmetic="fp32"), ValueError, ["arithmetic", "'fp32'"]),
        (lambda: featurize(td.Rademacher(2**31)), ValueError, ["1000000 samples", f"{2**31} columns"]),
    ),
    *rows(
        "SJLT",
        (lambda: td.SJLT(sparsity=65), ValueError, ["sparsity", "65"]),
    ),
    *rows(
        "Mask",
        (lambda: td.Mask(2**47), ValueError, ["keep", str(2**47)]),
        (lambda: featurize(td.Mask(3)), ValueError, ["2", "3"]),
        (lambda: td.Mask(5, 512), TypeError, ["then", "512"]),
        (lambda: td.Mask(5, td.Mask(4)), TypeError, ["then", "keep=4"]),
    ),
    *rows(
        "FastJL",
        (lambda: FastJL(1000, num_sms=132), ValueError, ["proj_dim", "1000"]),
    ),
    *rows(
        "Identity",
        (lambda: td.Identity(5), TypeError, ["Identity"]),
    ),
]  # fmt: skip


def with_spec(**changes: object) -> xr.Dataset:
    return features().assign_attrs(
        projector={**as_values(features().attrs)["projector"], **changes}
    )


PLAN = rows(
    "plan",
    (lambda: td.plan(samples()), ValueError, ["'feature'", "'x'"]),
    (lambda: td.plan(features().drop_attrs()), ValueError, ["'projector'", "'parameters'"]),
    (lambda: td.plan(td.testing.simulate_features()), ValueError, ["kind", "'simulated'"]),
    (lambda: td.plan(with_spec(definition=2)), ValueError, ["definition", "2"]),
    (lambda: td.plan(features(), [td.SJLT(8), None]), TypeError, ["projectors", "None"]),
    (lambda: td.plan(features(), n_fitted=-1), ValueError, ["n_fitted >= 1", "-1"]),
    (lambda: td.plan(features().compute(scheduler="sync"), pilot=True), ValueError, ["pilot=True"]),
)  # fmt: skip

test_bad_input = one_test([*PROJECTORS, *PLAN])
