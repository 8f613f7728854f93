"""What every lazy function of ``arrays`` promises: it computes what it declares, under a name of
its own for other inputs, and its errors name it. The functions are found by their annotations."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import pkgutil
from collections.abc import Callable
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from scipy import sparse

import trakdask.arrays
from tests.arrays.decomposed_features import data, decomposed, lazy
from trakdask.arrays.damping import GRID, made_choice
from trakdask.arrays.jackknife import LEVELS
from trakdask.arrays.score import estimate
from trakdask.arrays.solve import cholesky
from trakdask.arrays.weights import squared_norm

N, P, C, LABELS = 40, 6, 2, ["a", "b"]


def random(seed: int, *shape: int, dtype: str = "f8") -> da.Array:
    """Positive numbers in chunks (rows, p, 1) or (rows, 1)."""
    return lazy(np.random.default_rng(seed).random(shape).astype(dtype))


def positive_definite(seed: int) -> da.Array:
    x = np.random.default_rng(seed).standard_normal((20, P, C))
    return lazy(np.einsum("spc,sqc->pqc", x, x), P)


def table(seed: int, *shape: int) -> da.Array:
    """Positive numbers in chunks of 7."""
    return da.from_array(np.random.default_rng(seed).random(shape), chunks=7)


OF_SAMPLES = {
    *("weights", "loss_weights", "gram_weights", "out_to_loss", "forms", "outputs", "folds"),
    *("means_of_others.values", "predicted"),
}
"""Parameters with a number for each sample and checkpoint."""

FLAGS = {"margins", "quiet", "pooled", "average", "largest", "is_whole"}

INPUTS: dict[str, Callable[[int], Any]] = {
    # arrays
    "feature": lambda seed: random(seed, N, P, C, dtype="f4"),
    **dict.fromkeys(("target", "solved"), lambda seed: random(seed, 9, P, C, dtype="f4")),
    **dict.fromkeys(OF_SAMPLES, lambda seed: random(seed, N, C)),
    "norm": lambda seed: squared_norm(random(seed, N, P, C, dtype="f4")),
    **dict.fromkeys(("gram", "vectors"), positive_definite),
    "loss_gradient": lambda seed: lazy(np.random.default_rng(seed).random((P, C)), P),
    "damping": lambda seed: da.from_array(np.array([0.5, 1 + seed]), chunks=1),
    "spectrum": lambda seed: decomposed(data()[0] + seed, *data()[1:3]),
    "spectrum.values": lambda seed: lazy(np.random.default_rng(seed).random((P, C)), P),
    "inverse": lambda seed: cholesky(
        positive_definite(seed), da.from_array(np.array([0.5, 0.5]), chunks=1), LABELS
    ),
    "others": lambda seed: [(), (random(0, N, 9).rechunk(7),)][seed],
    "member_score.sums": lambda seed: da.from_array(
        np.random.default_rng(seed).random((3, C + 1, P, C)), chunks=(3, C + 1, P, 1)
    ),
    "ratio": lambda seed: da.from_array(np.random.default_rng(seed).normal(size=(N, 9)), chunks=7),
    "edges": lambda seed: np.linspace(5 + seed, 0, len(LEVELS)),
    "q": lambda seed: 0.1 + seed / 10,
    "name": lambda seed: ["score", "again"][seed],
    "tiles": lambda seed: da.from_array(
        np.full((N, 9), np.array((seed, 2), estimate("f4"))), chunks=7
    ),
    "quantile": lambda seed: 2.0 + seed,
    "sums": lambda seed: lazy(np.random.default_rng(seed).random((C, P, C)), P),
    "choose.totals": lambda seed: random(seed, N, len(GRID), C).rechunk({2: -1}),
    "choice": lambda seed: da.from_array(made_choice("trace", relative=seed)),
    "start": lambda seed: da.from_array(np.array(1.0 + seed)),
    "differ": lambda seed: da.from_array(np.array(seed == 0)),
    "samples": lambda seed: ["rows", "targets"][seed],
    "otherwise": lambda seed: ["trace", "given"][seed],
    "score": lambda seed: table(seed, N, 9),
    "masks": lambda seed: table(seed, 8, N) < 0.5,
    "values": lambda seed: table(seed, N, 9),
    "combine_rows.data": lambda seed: random(seed, N, P, C, dtype="f2"),
    "combine_rows.weights": lambda seed: sparse.csr_array(
        np.random.default_rng(seed).integers(-1, 2, (3, N)).astype("f8")
    ),
    "weighted_sums.members": lambda seed: (np.arange(N) + seed) % 3,
    "axes": lambda seed: ["sf", "sc"][seed],
    "dtype": lambda seed: ["f8", "f4"][seed],
    "among_best.score": lambda seed: table(seed, N),
    "among_best.counts": lambda seed: np.array([2, 3, 1 + seed]),
    "total": lambda seed: table(seed, N),
    "slope": lambda seed: da.from_array(np.array(1.0 + seed)),
    "effect": lambda seed: table(seed, 3, 9),
    "error": lambda seed: table(seed, 9),
    "variance": lambda seed: table(seed, 3),
    # options
    **dict.fromkeys(FLAGS, lambda seed: not seed),
    "n_sample": lambda seed: N + seed,
    "n_component": lambda seed: P - seed,
    "prior": lambda seed: [1.0, 10**0.5][seed],
    "n_samples": lambda seed: [N, 1000][seed],
    "n": lambda seed: N + seed,
    "labels": lambda seed: [LABELS, ["a", "c"]][seed],
    "power": lambda seed: [0.5, 1][seed],
    "codes": lambda seed: (np.arange(N) + seed) % 3,
    "n_groups": lambda seed: 3 + seed,
    "n_subsets": lambda seed: 6 + seed,
    "size": lambda seed: 10 + seed,
    "seed": lambda seed: seed,
    "groups": lambda seed: [None, np.arange(N) // 2][seed],
    "positions": lambda seed: np.array([1, 3 + seed]),
    "k": lambda seed: 2 + seed,
    "mask": lambda seed: [None, np.arange(N) % 2 == 0][seed],
}
"""The value of each parameter, or of "function.parameter", for seed 0; another one for seed 1."""

HELPERS = {
    *("align_weights", "blockwise", "field", "map_stored", "stored", "tree", "tree_sum", "where")
}
"""They make lazy functions."""


def lazy_functions() -> list[Callable[..., Any]]:
    found = []
    for info in pkgutil.iter_modules(trakdask.arrays.__path__):
        module = importlib.import_module(f"trakdask.arrays.{info.name}")
        for name, function in vars(module).items():
            if not inspect.isfunction(function) or name.startswith("_") or name in HELPERS:
                continue
            is_lazy = "da.Array" in function.__annotations__.get("return", "")
            found += [function] if is_lazy and function.__module__ == module.__name__ else []
    return found


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def inputs(function: Callable[..., Any], **seeds: int) -> dict[str, Any]:
    return {
        name: (INPUTS.get(f"{function.__name__}.{name}") or INPUTS[name])(seeds.get(name, 0))
        for name in parameters(function)
    }


def of(function: Callable[..., Any], given: dict[str, Any]) -> list[da.Array]:
    made = function(**given)
    return list(made) if isinstance(made, tuple) else [made]


def results(function: Callable[..., Any], **seeds: int) -> list[da.Array]:
    return of(function, inputs(function, **seeds))


def named(function: Callable[..., Any]) -> str:
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"


FUNCTIONS = lazy_functions()
PAIRS = [
    pytest.param(function, name, id=f"{named(function)}-{name}")
    for function in FUNCTIONS
    for name in parameters(function)
]


@pytest.mark.filterwarnings("ignore:models of half of the samples have hardly learned")
@pytest.mark.parametrize("function", FUNCTIONS, ids=named)
def test_lazy__blocks_are_as_declared(function: Callable[..., Any]) -> None:
    for array in results(function):
        blocks = array.to_delayed(optimize_graph=False).ravel()
        if array.dtype == object:
            continue  # one object per chunk
        found = dask.compute(*blocks, scheduler="sync")
        assert [block.shape for block in found] == list(itertools.product(*array.chunks))
        assert {block.dtype for block in found} == {array.dtype} == {array._meta.dtype}
        assert array._meta.ndim == array.ndim


@functools.cache
def first_names(function: Callable[..., Any]) -> list[str]:
    return [array.name for array in results(function)]


@pytest.mark.parametrize("function", FUNCTIONS, ids=named)
def test_lazy__equal_inputs_give_equal_names(function: Callable[..., Any]) -> None:
    """Dask then computes once what several results share."""
    assert [array.name for array in results(function)] == first_names(function)


@pytest.mark.parametrize(("function", "name"), PAIRS)
def test_lazy__another_input_gives_another_name(function: Callable[..., Any], name: str) -> None:
    """Otherwise a scheduler that knows the name would return the result of the other input."""
    assert [a.name for a in results(function, **{name: 1})] != first_names(function)


LARGE = {"feature", "target", "solved", "gram"}


@pytest.mark.parametrize("function", [f for f in FUNCTIONS if LARGE & {*parameters(f)}], ids=named)
def test_lazy__large_inputs_may_have_several_checkpoints_in_a_chunk(function: Any) -> None:
    given = inputs(function)
    turned = {name: given[name].rechunk({-1: C}) for name in LARGE & {*given}}
    found, expected = dask.compute(of(function, given | turned), of(function, given))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.tolist(), other.tolist(), rtol=1e-6)
