"""Intervals against float64 scores that are computed again without each checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from scipy import stats

import trakdask as td
from tests.attribution.float64_features import float64_features, with_values
from trakdask.arrays.jackknife import LEVELS
from trakdask.attribution.estimators import GradCos, GradDot

N, M, P, C = 60, 11, 5, 6
RATES = {f"c{c}": 0.1 + c for c in range(C)}
TRAIN = float64_features(N, P, C, 0, 16).assign_coords(
    source=("sample", np.array(["web", "wiki", None, "book"] * N, object)[:N])
)
TARGETS = float64_features(M, P, C, 1, 4)
#: Some means of Q have another sign without a checkpoint.
SIGNED = TRAIN.assign(out_to_loss=TRAIN.out_to_loss - 0.5)
LAMBDA = xr.DataArray(1.0 + np.arange(C), coords={"checkpoint": list(RATES)})


def failed(train: xr.Dataset) -> xr.Dataset:
    """Sample 7 failed everywhere, and sample 20 at the third checkpoint."""
    is_whole = np.ones((N, C), bool)
    is_whole[7], is_whole[20, 2] = False, False
    whole = xr.DataArray(is_whole, dims=("sample", "checkpoint"))
    names = ("feature", "out_to_loss")
    return train.assign(
        {name: train[name].where(whole).transpose(*train[name].dims) for name in names}
    )


ESTIMATORS: dict[str, Callable[[xr.Dataset], td.attribution.protocol.Estimator]] = {
    "trak": lambda ds: td.Trak(LAMBDA),
    "soft": lambda ds: td.Soft(power=0.5, damping=LAMBDA),
    "relatif": lambda ds: td.RelatIF(LAMBDA),
    "grad_dot": lambda ds: GradDot(),
    "grad_cos": lambda ds: GradCos(),
    # A sum over some checkpoints, as a sum over all of them.
    "tracin": lambda ds: td.TracIn({c: RATES[c] * C / ds.sizes["checkpoint"] for c in RATES}),
}
CASES = {
    name: (name, train)
    for name, train in [(name, TRAIN) for name in ESTIMATORS]
} | {
    f"{name}, {what}": (name, train)
    for what, train, names in [
        ("signed", SIGNED, ["trak", "relatif", "grad_cos"]),
        ("failed", failed(TRAIN), list(ESTIMATORS)),
    ]
    for name in names
}  # fmt: skip


def intervals(
    features: xr.Dataset,
    targets: xr.Dataset | None = None,
    estimator: object = "auto",
    level: float = 0.9,
    **options,
) -> xr.Dataset:
    """Ask the function of scores that these arguments belong to."""
    sides = (features,) if targets is None else (features, targets)
    single = td.self_influence if targets is None else td.score
    ask = td.group_score if "by" in options else single
    return ask(*sides, estimator, level=level, **options)


Query = Callable[[xr.Dataset, xr.Dataset, object], xr.DataArray]


def expected(
    query: Query, name: str, train: xr.Dataset, level: float = 0.9
) -> dict[str, np.ndarray]:
    """The query without each checkpoint in turn; each checkpoint keeps its gram matrix."""
    train, targets = train.compute(), TARGETS.compute()  # one block is many times faster

    def at(chosen: list[int]) -> np.ndarray:
        rows = train.isel(checkpoint=chosen)
        return query(rows, targets.isel(checkpoint=chosen), ESTIMATORS[name](rows)).values

    score = at(list(range(C)))
    without = np.stack([at([c for c in range(C) if c != j]) for j in range(C)])
    error = np.sqrt((C - 1) / C * ((without - without.mean(0)) ** 2).sum(0))
    margin = stats.t.ppf((1 + level) / 2, C - 1) * error
    with np.errstate(invalid="ignore"):  # of a combination without samples
        ratio = score / error
    return {"score": score, "lower": score - margin, "upper": score + margin, "snr": ratio}


def require_equal(found: xr.Dataset, oracle: dict[str, np.ndarray]) -> None:
    scale = np.nanmax(np.abs(oracle["score"]))
    for name, values in oracle.items():
        # Where a sample failed at one checkpoint, there is a score without it, but none with all.
        values = np.where(np.isnan(oracle["score"]), np.nan, values)
        np.testing.assert_allclose(
            found[name], values, rtol=1e-6, atol=0 if name == "snr" else 1e-9 * scale
        )


@pytest.mark.parametrize("case", [case for case in CASES if "," in case])
def test_intervals__of_pairs_are_a_jackknife_over_checkpoints(case: str) -> None:
    (name, train), level = CASES[case], 0.5 if "signed" in case else 0.9
    found = intervals(train, TARGETS, ESTIMATORS[name](train), level=level).compute()
    require_equal(found, expected(td.score, name, train, level))
    assert found.score.dims == ("sample", "target")
    assert found.attrs["level"] == level
    assert {"source", "target_label"} <= set(found.coords)


@pytest.mark.parametrize("case", [*ESTIMATORS, "relatif, signed"])
def test_intervals__of_groups_are_a_jackknife_of_their_sums(case: str) -> None:
    (name, train), by = CASES[case], ["source", "label"]
    found = intervals(train, TARGETS, ESTIMATORS[name](train), by=by).compute()
    oracle = expected(lambda *args: td.group_score(*args, by=by), name, train)
    require_equal(found, oracle)
    assert found.score.dims == (*by, "target")


@pytest.mark.parametrize("name", ["soft", "grad_cos", "tracin"])
def test_intervals__groups_leave_out_samples_that_failed(name: str) -> None:
    train = failed(TRAIN)
    found = intervals(train, TARGETS, ESTIMATORS[name](train), by="label").compute()
    whole = td.group_score(train, TARGETS, ESTIMATORS[name](train), by="label")
    np.testing.assert_allclose(found.score, whole, rtol=1e-9)
    assert np.isfinite(found.upper).all()


@pytest.mark.parametrize("name", ["trak", "soft", "grad_dot"])
def test_intervals__of_self_influence_square_the_mean_weight(name: str) -> None:
    train = failed(TRAIN)
    found = intervals(train, estimator=ESTIMATORS[name](train)).compute()
    require_equal(found, expected(lambda x, _, e: td.self_influence(x, e), name, train))
    assert found.score.dims == ("sample",)


@pytest.mark.parametrize("options", [{}, {"by": "label"}, {"targets": None}], ids=str)
def test_intervals__do_not_depend_on_chunks_and_stores(options, tmp_path: Path) -> None:
    estimator = td.Soft(damping=td.Absolute(1.0))
    targets = options.pop("targets", TARGETS)
    apart = intervals(TRAIN, targets, estimator, **options).compute()
    one = targets and targets.chunk(sample=-1)
    td.save(TRAIN.drop_vars("source"), tmp_path / "f.zarr", estimator="soft", progress=False)
    for train in (TRAIN.chunk(sample=23), TRAIN.compute(), td.open(tmp_path / "f.zarr")):
        for to in (targets, one):
            found = intervals(train, to, estimator, **options)
            for name in ("lower", "upper", "snr"):
                np.testing.assert_allclose(found[name], apart[name], rtol=1e-6, atol=1e-12)


def test_intervals__float32_is_precise_where_checkpoints_hardly_differ() -> None:
    x = np.random.default_rng(0).standard_normal((N, P, 1)).astype("f4")
    x = x + 1e-3 * np.random.default_rng(1).standard_normal((N, P, C)).astype("f4")
    train = with_values(TRAIN, feature=x, out_to_loss=np.ones((N, C), "f4"))
    found = intervals(train, train, "grad_dot")
    wide = intervals(train.astype("f8"), train.astype("f8"), "grad_dot")
    assert found.upper.dtype == np.float32
    width = wide.upper - wide.lower
    assert float(abs((found.upper - found.lower) / width - 1).max()) < 0.02


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("rank_by", ["score", "lower", "snr"])
def test_top_k__has_the_intervals_of_its_winners(rank_by: str, largest: bool) -> None:
    found = intervals(TRAIN, TARGETS, "trak")
    top = td.top_k(found, 20, rank_by=rank_by, largest=largest, where="label == 1").compute()
    values = found.compute().where(TRAIN.label == 1)
    order = np.argsort(-values[rank_by] if largest else values[rank_by], axis=0)[:20].T
    np.testing.assert_array_equal(top.position, order)
    for name in ("score", "lower", "upper", "snr"):
        expected = np.take_along_axis(values[name].values.T, order.values, 1)
        np.testing.assert_allclose(top[name], expected, rtol=1e-6)
    assert top.attrs["level"] == 0.9


def test_top_k__intervals_of_self_influence_and_of_few_samples() -> None:
    own = td.top_k(intervals(TRAIN, estimator="trak"), 4, rank_by="lower").compute()
    assert own.upper.dims == ("rank",)
    assert (np.diff(own.lower) <= 0).all()
    mask = np.zeros((N, M), bool)
    mask[3] = True
    few = td.top_k(intervals(TRAIN, TARGETS, "trak"), 4, where=mask).compute()
    assert (few.position[:, 0] == 3).all()
    assert few.snr[:, 1:].isnull().all()
    nothing = intervals(TRAIN.isel(sample=slice(0)).chunk(sample=5), TARGETS, "grad_dot")
    assert nothing.snr.shape == (0, M)


@pytest.mark.parametrize("options", [{}, {"by": "source"}, {"targets": None}], ids=str)
def test_intervals__kept_are_chosen_by_the_procedure_of_scipy(options) -> None:
    options = {"features": TRAIN, "targets": TARGETS, "estimator": "grad_dot"} | options
    found, kept = intervals(**options).compute(), intervals(**options, q=0.2)
    p = 2 * stats.t.sf(np.abs(found.snr.values), C - 1)
    rounded = LEVELS[np.searchsorted(LEVELS, p * (1 - 1e-9))]
    expected = stats.false_discovery_control(rounded, axis=0) <= 0.2
    xr.testing.assert_allclose(kept.drop_attrs(), found.where(expected).drop_attrs())
    assert 0 < expected.mean() < 1 or options["targets"] is None
    if "by" not in options and options["targets"] is not None:
        top = td.top_k(kept, N).compute()
        np.testing.assert_array_equal((top.position >= 0).sum("rank"), expected.sum(axis=0))


AUTHORS = xr.DataArray(
    np.random.default_rng(2).dirichlet([0.3] * 3, N) * (np.arange(N) % 5 > 0)[:, None],
    {"author": ["Ada", "Bo", "Cy"]}, ("sample", "author"),
)  # fmt: skip


_LINEAR = ["trak", "soft", "relatif, signed", "grad_dot", "tracin"]


@pytest.mark.parametrize("case", [*_LINEAR, "grad_cos", "grad_cos, signed"])
def test_shares__are_of_all_scores(case: str) -> None:
    name, train = CASES[case]
    score = td.score(train, TARGETS, ESTIMATORS[name](train)).sum("target").compute()
    found = td.group_score(train, TARGETS, ESTIMATORS[name](train), by=AUTHORS, share=True)
    expected = (AUTHORS * score).sum("sample") / score.sum()
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert found.author.values.tolist() == ["Ada", "Bo", "Cy"]


def test_intervals__of_parts_are_those_of_a_coord() -> None:
    parts = xr.DataArray(
        TRAIN.label.values[:, None] == [0, 1], {"label": [0, 1]}, ("sample", "label")
    )
    groups = intervals(TRAIN, TARGETS, "trak", by=parts)
    by_name = intervals(TRAIN, TARGETS, "trak", by="label")
    xr.testing.assert_allclose(groups.compute(), by_name.compute())


def test_top_k__ignores_variables_along_other_dimensions() -> None:
    found = intervals(TRAIN, TARGETS, "trak").assign(weight=("sample", np.ones(N)))
    assert "weight" not in td.top_k(found, 2)
