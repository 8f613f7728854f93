"""Bad inputs of featurize, and of models that are run by it."""

from __future__ import annotations

import functools

import numpy as np
import xarray as xr
from torch import nn

import trakdask as td
from tests.bad_inputs.bad_input import BadInput, one_test
from tests.bad_inputs.small_models import (
    BIG,
    NAN,
    NET,
    After,
    AllColumns,
    Detached,
    Mean,
    TwoTowers,
    computed,
    data,
    labelled,
    options,
)

F = "featurize"

ROWS = [
    BadInput(F, "samples a list", options([1]), TypeError, ["Dataset", "list"]),
    BadInput(F, "no sample dimension", options(xr.Dataset({"image": ("row", [1.0])})), ValueError, ["'sample'", "['row']"]),
    BadInput(F, "one sample without its dimension", options(data().isel(sample=0)), ValueError, ["'sample'", "isel(sample=[0])"]),
    BadInput(F, "like samples", lambda _: td.featurize(data(), td.Model(NET), like=data()), ValueError, ["'feature'", "in like", "td.featurize"]),
    BadInput(F, "like a path", lambda _: td.featurize(data(), td.Model(NET), like="train.zarr"), TypeError, ["like", "'train.zarr'", "td.open"]),
    BadInput(F, "no variables", options(xr.Dataset(coords={"c": ("sample", [1])})), ValueError, ["reset_coords"]),
    BadInput(F, "a module", lambda _: td.featurize(data(), NET), TypeError, ["td.Model", "Linear"]),
    BadInput("fit", "a module", lambda _: td.fit(data(), NET), TypeError, ["td.Model", "Linear"]),
    BadInput("fit", "components a word", lambda _: td.fit(data(), td.Model(NET), components="no"), TypeError, ["components", "'no'", "True"]),
    *[BadInput(name, "progress a word", lambda _, call=call: call(progress="no"), TypeError, ["progress", "'no'"]) for name, call in {"fit": functools.partial(td.fit, data(), td.Model(NET)), "fits.curvature": functools.partial(td.fits.curvature, data(), td.Model(NET)), "fits.second_moments": functools.partial(td.fits.second_moments, td.Model(NET), [{}])}.items()],
    BadInput("fit", "sketch a name", lambda _: td.fit(data(), td.Model(NET), sketch="SJLT"), TypeError, ["sketch, got 'SJLT'", "try sketch=td.SJLT"]),
    BadInput("fit", "curvature a name", lambda _: td.fit(data(), td.Model(NET), curvature="off"), ValueError, ["'off'"]),
    BadInput(F, "projector a number", options(projector=512), TypeError, ["projector", "512"]),
    BadInput(F, "device", options(device="gpu"), ValueError, ["'gpu'"]),
    BadInput(F, "batch_size 0", options(batch_size=0), ValueError, ["batch_size", "0"]),
    *[BadInput(F, f"batch_size {size!r}", options(batch_size=size), TypeError, ["batch_size", repr(size)]) for size in (2.5, None)],
    BadInput(F, "batch statistics", computed(nn.Sequential(NET, nn.BatchNorm1d(3, track_running_stats=False))), RuntimeError, ["samples 0:"]),
    *[BadInput(F, f"label with {engine}", labelled(BIG, gradients=engine), RuntimeError, ["got 7 at sample 2"]) for engine in ("hooks", "vmap", "loop")],
    BadInput(F, "label in all of a block", labelled([9, 8, 7, 6], on_error="record"), RuntimeError, ["got 9 at sample 0"]),
    BadInput(F, "label float", labelled([0.0, 1, 2, 0]), RuntimeError, ["'label'", "float64"]),
    BadInput(F, "not finite", computed(After(), td.from_arrays(NAN)), RuntimeError, ["sample 1", "NaN"]),
    BadInput(F, "wrong width", computed(After(), data(image=np.ones((4, 5), "f4"))), RuntimeError, ["shapes", "(4, 5)", "the shape and range that the model was trained on"]),
    BadInput(F, "float64 images", computed(After(), data(image=np.ones((4, 4)))), RuntimeError, ["image float64", "dtype='float32')"]),
    *[BadInput(F, f"float64 weights, {engine}", computed(After().double(), gradients=engine), RuntimeError, ["image float32", "dtype='float32')"]) for engine in ("hooks", "vmap", "loop")],
    BadInput(F, "bfloat16 weights", computed(After().bfloat16()), RuntimeError, ["image float32", "dtype='float32')"]),
    BadInput(F, "integer images", computed(After(), data(image=np.ones((4, 4), "u1"))), RuntimeError, ["image uint8", "samples.assign(image=samples['image'].astype('float32'))"]),
    BadInput(F, "fewer rows", computed(After(lambda y: y[1:])), RuntimeError, ["(2, classes)", "(1, 3)"]),
    BadInput(F, "mean of the batch", computed(After(lambda y: y - y.mean(0).detach())), RuntimeError, ["sample 0"]),
    BadInput(F, "dropout", computed(After(lambda y: nn.functional.dropout(y, 0.5))), RuntimeError, ["dropout"]),
    BadInput(F, "task without samples", computed(After(), task=Mean()), RuntimeError, ["task.output", "()"]),
    *[BadInput(F, f"no gradient, {name}", computed(After(), task=Detached(), gradients=name), RuntimeError, ["no gradient", "torch.no_grad()", ".detach()"]) for name in ("auto", "hooks", "vmap", "loop")],
    BadInput(F, "several outputs", computed(After(), task=AllColumns(3)), RuntimeError, ["(4, 3)", "td.tasks.MultiLabel()"]),
    BadInput(F, "an axis of one", computed(After(), task=AllColumns(1)), RuntimeError, ["(4, 1)", "try .flatten()"]),
    BadInput(F, "arguments", computed(TwoTowers()), RuntimeError, ["TypeError", "'text'"]),
]  # fmt: skip

test_bad_input = one_test(ROWS)
