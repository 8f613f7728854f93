"""Bad inputs of projectors and of plan."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import xarray as xr

import trakdask as td
from tests.bad_inputs.bad_input import BadInput, check, parametrize


@functools.cache
def samples() -> xr.Dataset:
    return td.from_arrays(
        {"x": np.zeros((10**6, 1), "f4"), "y": np.zeros(10**6, "f4")}, chunks=10**6
    )


@functools.cache
def model() -> td.Model:
    return td.Model(torch.nn.Linear(1, 1), task="regression")


@functools.cache
def features() -> xr.Dataset:
    return td.featurize(samples().isel(sample=slice(8)), model(), projector=td.SJLT(8))


def featurize(projector: td.Projector) -> xr.Dataset:
    return td.featurize(samples(), model(), projector=projector)


def too_large(name: str, projector: td.Projector, width: int) -> BadInput:
    """Return the row of a projector whose features of a million samples cannot fit anywhere."""
    words = ["1000000 samples", f"{width} columns", "bytes", "samples.chunk"]
    return BadInput(
        name, "features that fit nowhere", lambda _: featurize(projector), ValueError, words
    )


DENSE = [
    row
    for name, kind in (("Rademacher", td.Rademacher),)
    for row in (
        BadInput(name, "no columns", lambda _, k=kind: k(0), ValueError, ["proj_dim", "0", "2048"]),
        BadInput(name, "negative", lambda _, k=kind: k(-5), ValueError, ["proj_dim", "-5"]),
        BadInput(
            name, "too many", lambda _, k=kind: k(2**32), ValueError, ["proj_dim", str(2**32)]
        ),
        BadInput(name, "float", lambda _, k=kind: k(2048.0), TypeError, ["proj_dim", "2048.0"]),
        BadInput(name, "text", lambda _, k=kind: k("2048"), TypeError, ["proj_dim", "'2048'"]),
        BadInput(name, "bool", lambda _, k=kind: k(True), TypeError, ["proj_dim", "True"]),
        BadInput(name, "None", lambda _, k=kind: k(None), TypeError, ["proj_dim", "None"]),
        BadInput(name, "an array", lambda _, k=kind: k(np.arange(3)), TypeError, ["proj_dim"]),
        BadInput(name, "NaN", lambda _, k=kind: k(float("nan")), TypeError, ["proj_dim", "nan"]),
        BadInput(name, "seed 1.5", lambda _, k=kind: k(seed=1.5), TypeError, ["seed", "1.5"]),
        BadInput(
            name, "seed -1", lambda _, k=kind: k(seed=-1), ValueError, ["seed", "-1", "2**64"]
        ),
        BadInput(name, "seed list", lambda _, k=kind: k(seed=[0]), TypeError, ["seed", "[0]"]),
        BadInput(
            name,
            "unknown arithmetic",
            lambda _, k=kind: k(arithmetic="fp32"),
            ValueError,
            ["arithmetic", "'fp32'", "'int8x2'"],
        ),
        BadInput(
            name,
            "arithmetic is a dtype",
            lambda _, k=kind: k(arithmetic=torch.int8),
            ValueError,
            ["arithmetic", "torch.int8"],
        ),
        BadInput(
            name, "replaced", lambda _, k=kind: replace(k(), proj_dim=0), ValueError, ["proj_dim"]
        ),
        too_large(name, kind(2**31), 2**31),
    )
]

OTHERS = [
    BadInput("SJLT", "no columns", lambda _: td.SJLT(0), ValueError, ["proj_dim", "0", "4096"]),
    BadInput("SJLT", "too many", lambda _: td.SJLT(2**31), ValueError, ["proj_dim", "2147483648"]),
    BadInput("SJLT", "float", lambda _: td.SJLT(4096.5), TypeError, ["proj_dim", "4096.5"]),
    BadInput("SJLT", "no signs", lambda _: td.SJLT(sparsity=0), ValueError, ["sparsity", "0", "4"]),
    BadInput("SJLT", "dense", lambda _: td.SJLT(sparsity=65), ValueError, ["sparsity", "65"]),
    BadInput("SJLT", "a share", lambda _: td.SJLT(sparsity=0.1), TypeError, ["sparsity", "0.1"]),
    BadInput("SJLT", "seed None", lambda _: td.SJLT(seed=None), TypeError, ["seed", "None"]),
    too_large("SJLT", td.SJLT(2**31 - 1), 2**31 - 1),
    BadInput("Mask", "none kept", lambda _: td.Mask(0), ValueError, ["keep", "0", "65536"]),
    BadInput("Mask", "a share", lambda _: td.Mask(0.1), TypeError, ["keep", "0.1"]),
    BadInput("Mask", "too many", lambda _: td.Mask(2**47), ValueError, ["keep", str(2**47)]),
    BadInput(
        "Mask", "more than there are", lambda _: featurize(td.Mask(3)), ValueError, ["2", "3"]
    ),
    BadInput("Mask", "then a width", lambda _: td.Mask(5, 512), TypeError, ["then", "512"]),
    BadInput("Mask", "then a class", lambda _: td.Mask(5, td.SJLT), TypeError, ["then", "SJLT"]),
    BadInput(
        "Mask", "then a mask", lambda _: td.Mask(5, td.Mask(4)), TypeError, ["then", "keep=4"]
    ),
    BadInput(
        "Mask",
        "then shapes",
        lambda _: td.Mask(5, td.Kronecker()),
        TypeError,
        ["then", "Kronecker"],
    ),
    too_large("Mask", td.Mask(2, td.Rademacher(2**31)), 2**31),
    BadInput("Kronecker", "left 0", lambda _: td.Kronecker(0), ValueError, ["left", "0", "64"]),
    BadInput(
        "Kronecker",
        "right too large",
        lambda _: td.Kronecker(64, 2**16),
        ValueError,
        ["right", "65536"],
    ),
    BadInput(
        "Kronecker", "a pair", lambda _: td.Kronecker((64, 64)), TypeError, ["left", "(64, 64)"]
    ),
    BadInput(
        "Kronecker", "seed text", lambda _: td.Kronecker(seed="0"), TypeError, ["seed", "'0'"]
    ),
    too_large("Kronecker", td.Kronecker(2**16 - 1, 2**16 - 1), (2**16 - 1) ** 2),
    BadInput(
        "FastJL",
        "multiple of 512",
        lambda _: td.FastJL(1000, num_sms=132),
        ValueError,
        ["proj_dim", "1000", "1024"],
    ),
    BadInput(
        "FastJL",
        "seed",
        lambda _: td.FastJL(seed=2**31, num_sms=132),
        ValueError,
        ["seed", "2147483648"],
    ),
    BadInput(
        "FastJL",
        "entries",
        lambda _: td.FastJL(entries="gauss", num_sms=132),
        ValueError,
        ["entries", "'gauss'", "'normal'"],
    ),
    BadInput(
        "FastJL", "no processors", lambda _: td.FastJL(num_sms=0), ValueError, ["num_sms", "0"]
    ),
    BadInput(
        "FastJL", "text", lambda _: td.FastJL(num_sms="H100"), TypeError, ["num_sms", "'H100'"]
    ),
    too_large("FastJL", td.FastJL(2**31 - 512, num_sms=132), 2**31 - 512),
    BadInput("Identity", "a width", lambda _: td.Identity(5), TypeError, ["Identity"]),
    BadInput(
        "Identity",
        "features that fit nowhere",
        lambda _: td.featurize(
            samples(),
            td.Model(torch.nn.Linear(1000, 1000), task="regression"),
            projector=td.Identity(),
        ),
        ValueError,
        ["1000000 samples", "1001000 columns", "bytes", "samples.chunk"],
    ),
]


def with_attrs(**attrs: object) -> xr.Dataset:
    return features().assign_attrs(attrs)


def spec(**changes: object) -> dict[str, object]:
    return {**features().attrs["projector"], **changes}


PLAN = [
    BadInput("plan", "None", lambda _: td.plan(None), TypeError, ["features", "NoneType"]),
    BadInput("plan", "a path", lambda _: td.plan("f.zarr"), TypeError, ["features", "str"]),
    BadInput(
        "plan", "one variable", lambda _: td.plan(features().feature), TypeError, ["DataArray"]
    ),
    BadInput("plan", "samples", lambda _: td.plan(samples()), ValueError, ["'feature'", "'x'"]),
    BadInput(
        "plan",
        "no attrs",
        lambda _: td.plan(features().drop_attrs()),
        ValueError,
        ["'projector'", "'parameters'"],
    ),
    BadInput(
        "plan",
        "simulated",
        lambda _: td.plan(td.testing.simulate_features()),
        ValueError,
        ["kind", "'simulated'", "'rademacher'"],
    ),
    BadInput(
        "plan",
        "kind is a list",
        lambda _: td.plan(with_attrs(projector=spec(kind=["sjlt"]))),
        ValueError,
        ["kind", "['sjlt']"],
    ),
    BadInput(
        "plan",
        "another definition",
        lambda _: td.plan(with_attrs(projector=spec(definition=2))),
        ValueError,
        ["definition", "2", "featurize again"],
    ),
    BadInput(
        "plan",
        "width of another type",
        lambda _: td.plan(with_attrs(projector=spec(proj_dim="8"))),
        TypeError,
        ["proj_dim", "'8'"],
    ),
    BadInput(
        "plan",
        "unknown field",
        lambda _: td.plan(with_attrs(projector=spec(rank=3))),
        ValueError,
        ["rank", "3"],
    ),
    BadInput(
        "plan",
        "projectors is a number",
        lambda _: td.plan(features(), 512),
        TypeError,
        ["projectors", "512"],
    ),
    BadInput(
        "plan",
        "projectors is a text",
        lambda _: td.plan(features(), "SJLT"),
        TypeError,
        ["projectors", "'SJLT'"],
    ),
    BadInput(
        "plan",
        "a class",
        lambda _: td.plan(features(), [td.SJLT]),
        TypeError,
        ["projectors", "SJLT"],
    ),
    BadInput(
        "plan",
        "a None among them",
        lambda _: td.plan(features(), [td.SJLT(8), None]),
        TypeError,
        ["projectors", "None"],
    ),
    BadInput(
        "plan",
        "pilot is a text",
        lambda _: td.plan(features(), pilot="yes"),
        TypeError,
        ["pilot", "'yes'"],
    ),
    BadInput(
        "plan",
        "pilot of computed features",
        lambda _: td.plan(features().compute(scheduler="sync"), pilot=True),
        ValueError,
        ["pilot=True", "already computed"],
    ),
    BadInput(
        "plan",
        "pilot of no samples",
        lambda _: td.plan(features().isel(sample=[]), pilot=True),
        ValueError,
        ["pilot=True", "(0, 8, 1)"],
    ),
    BadInput(
        "plan",
        "a projector that cannot serve",
        lambda _: td.plan(features(), td.Mask(3)),
        ValueError,
        ["keep", "2", "3"],
    ),
]

ROWS = [*DENSE, *OTHERS, *PLAN]


@parametrize(ROWS)
def test_bad_input(row: BadInput, tmp_path: Path) -> None:
    check(row, tmp_path)
