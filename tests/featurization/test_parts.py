"""featurize_parts: parts add up to samples, whatever they are and however they are computed."""

from __future__ import annotations

import dask
import numpy as np
import pytest
import torch
import xarray as xr
from distributed import Client
from torch import nn

import trakdask as td
from tests.models.test_tokens import LENGTH, TASK, VOCABULARY, Gpt, Pooled
from tests.models.token_oracle import contributions
from trakdask.models.tasks import Batch
from trakdask.testing import raise_if_dask_computes


def state(seed: int, build: type[nn.Module] = Gpt) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return build().state_dict()


def model(n: int = 2, **options) -> td.Model:
    return td.Model(Gpt, {f"c{i}": state(i) for i in range(n)}, task=TASK, **options)


def samples(n: int = 5, chunks: int = 2) -> xr.Dataset:
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (n, LENGTH))
    return td.from_arrays({"input_ids": ids}, coords={"source": list("abcde")[:n]}, chunks=chunks)


def test_featurize_parts__tokens_against_the_oracle() -> None:
    found = td.featurize_parts(samples(), model(1), parts="token", projector=td.Identity())
    module = Gpt()
    module.load_state_dict(state(0))
    batch = Batch(input_ids=torch.tensor(samples().input_ids.values))
    expected = contributions(module.double(), TASK, batch, LENGTH)
    flat = np.concatenate([expected[name].numpy() for name in model(1).shapes], axis=2)
    assert found.feature.dims == ("sample", "token", "proj_dim", "checkpoint")
    np.testing.assert_allclose(found.feature[..., 0], flat, rtol=1e-3, atol=1e-5)


PROJECTORS = [
    td.Identity(),
    td.SJLT(proj_dim=64),
    td.Rademacher(proj_dim=64),
    td.Mask(keep=50),
    td.Kronecker(left=8, right=8),
]
PARTS = {
    "token": "token",
    "list": ["attn", "mlp"],
    "mapping": {"in": ["wte*", "wpe*"], "up": "mlp.0*"},
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("projector", PROJECTORS, ids=lambda p: type(p).__name__)
def test_featurize_parts__add_up_to_featurize(projector: td.Projector, parts) -> None:
    found = td.featurize_parts(samples(), model(), parts=parts, projector=projector)
    whole = td.featurize(samples(), model(), projector=projector)
    dim = found.feature.dims[1]
    found, whole = dask.compute(found, whole)
    scale = float(np.abs(whole.feature).max())
    np.testing.assert_allclose(found.feature.sum(dim), whole.feature, rtol=0, atol=1e-3 * scale)
    for name in ("output", "out_to_loss"):
        np.testing.assert_allclose(found[name], whole[name], rtol=1e-5)
    largest = np.abs(found.feature).max(["sample", "proj_dim", "checkpoint"])
    assert (largest[:-1] > 0).all()
    assert (largest[-1] > 0) == (dim == "module")  # nothing is predicted after the last token


def test_featurize_parts__modules_are_the_gradients_of_their_parameters() -> None:
    parts = {"mlp": "mlp.*", "norms": ["norm.*", "rms.*"]}
    found = td.featurize_parts(samples(), model(), parts=parts, projector=td.Identity()).compute()
    whole = td.featurize(samples(), model(), projector=td.Identity()).compute()
    assert found.module.values.tolist() == ["mlp", "norms", "others"]
    start, prefixes = 0, {"mlp": ("mlp.",), "norms": ("norm.", "rms.")}
    for name, shape in model().shapes.items():
        size = int(np.prod(shape))
        columns, start = slice(start, start + size), start + size
        for title in ("mlp", "norms"):
            part = found.feature.sel(module=title)[:, columns]
            expected = whole.feature[:, columns] * name.startswith(prefixes[title])
            np.testing.assert_allclose(part, expected, rtol=1e-4, atol=1e-6)


def test_featurize_parts__every_engine_divides_by_modules() -> None:
    found = [
        td.featurize_parts(
            samples(), model(), parts=["attn"], projector=td.SJLT(32), gradients=engine
        ).feature.compute()
        for engine in ("hooks", "vmap", "loop")
    ]
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=0, atol=1e-3)


@pytest.mark.parametrize("parts", ["token", ["attn", "mlp"]], ids=["token", "module"])
def test_featurize_parts__blocks_and_micro_batches_do_not_matter(parts) -> None:
    options = {"parts": parts, "projector": td.Identity()}
    expected = td.featurize_parts(samples(), model(), **options).feature.compute()
    for chunks, size in ((5, 1), (5, 5), (1, "auto")):
        again = td.featurize_parts(samples(chunks=chunks), model(), batch_size=size, **options)
        np.testing.assert_allclose(again.feature, expected, rtol=1e-4, atol=1e-6)


def test_featurize_parts__is_lazy_and_labelled() -> None:
    words = [f"w{i}" for i in range(VOCABULARY)]
    with raise_if_dask_computes():
        lazy = td.featurize_parts(samples(), model(), parts="token", text=words)
    assert lazy.feature.chunks[0] == (2, 2, 1)
    assert lazy.checkpoint.values.tolist() == ["c0", "c1"]
    assert lazy.source.values.tolist() == list("abcde")
    ids = samples().input_ids.values
    np.testing.assert_array_equal(lazy.coords["input_ids"], ids)
    assert lazy.coords["text"].dims == ("sample", "token")
    assert lazy.coords["text"].values[1, 2] == f"w{ids[1, 2]}"
    by_function = td.featurize_parts(samples(), model(), parts="token", text=lambda i: f"w{i}")
    assert (by_function.coords["text"].values == lazy.coords["text"].values).all()
    assert lazy.attrs["parts"] == {"dim": "token", "groups": None}


@pytest.mark.parametrize("chunks", [1, 5])
def test_featurize_parts__padding_contributes_nothing(chunks: int) -> None:
    ids = samples().input_ids.values
    mask = np.ones_like(ids)
    mask[0, 4:] = 0
    task = td.tasks.CausalLM(("input_ids", "attention_mask"))
    build = Masked
    padded = td.from_arrays({"input_ids": ids, "attention_mask": mask}, chunks=chunks)
    made = td.Model(build, {"c0": state(0, build)}, task=task)
    found = td.featurize_parts(padded, made, parts="token", projector=td.SJLT(32)).feature.compute()
    assert (found[0, 3:] == 0).all()  # after the last token that is attended, none is predicted
    whole = td.featurize(padded, made, projector=td.SJLT(32)).feature.compute()
    scale = float(np.abs(whole).max())
    np.testing.assert_allclose(found.sum("token"), whole, rtol=0, atol=1e-3 * scale)
    assert (np.abs(found[1:, :-1]).max(["proj_dim", "checkpoint"]) > 0).all()


class Masked(Gpt):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids)


def test_featurize_parts__failed_samples_are_recorded() -> None:
    ids = samples().input_ids.values.copy()
    ids[3, 2] = VOCABULARY
    broken = td.from_arrays({"input_ids": ids}, chunks=5)
    found = td.featurize_parts(
        broken, model(), parts="token", projector=td.SJLT(16), on_error="record"
    ).compute()
    assert np.isnan(found.feature[3]).all()
    assert np.isfinite(found.feature.drop_isel(sample=3)).all()
    assert (found.error[3] != "").all()


@pytest.mark.slow
def test_featurize_parts__questions_have_the_same_answers_on_worker_processes(
    process_client: Client,
) -> None:
    def answers() -> tuple[xr.Dataset, xr.DataArray, xr.Dataset]:
        features = td.featurize(samples(), model(), projector=td.SJLT(32))
        parts = td.featurize_parts(
            samples(), model(), parts="token", projector=td.SJLT(32), text=lambda i: f"w{i}"
        )
        combined = td.combine(features, by="source")
        words = td.score(features, combined, of=parts, damping=0.1)
        selection = td.top_fraction(td.score(features, combined, damping=0.1), 0.5)
        return dask.compute(parts, words, selection)

    there = answers()
    with dask.config.set(scheduler="threads"):
        here = answers()
    for ours, theirs in zip(here, there, strict=True):
        xr.testing.assert_identical(ours, theirs)


def test_featurize_parts__layer_without_tokens_fails_with_its_name() -> None:
    pooled = td.Model(Pooled, [state(0, Pooled)], task=TASK)
    lazy = td.featurize_parts(samples(), pooled, parts="token", projector=td.SJLT(16))
    with pytest.raises(td.BlockError, match="'head'"):
        lazy.compute()


class AcrossTokens(nn.Module):
    """A layer without a rule that looks at the token before: its terms are not those of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1) * self.weight


class Mixed(Gpt):
    def __init__(self) -> None:
        super().__init__()
        self.own = AcrossTokens()


def test_featurize_parts__a_layer_that_mixes_tokens_is_found_by_its_sum() -> None:
    mixed = td.Model(Mixed, [state(0, Mixed)], task=TASK)
    lazy = td.featurize_parts(samples(), mixed, parts="token", projector=td.SJLT(16))
    with pytest.raises(td.BlockError, match=r"own\.weight"):
        lazy.compute()


def test_featurize_parts__stores_say_that_they_take_whole_samples(tmp_path) -> None:
    lazy = td.featurize_parts(samples(), model(), parts=["attn"], projector=td.SJLT(16))
    with pytest.raises(ValueError, match=r"'module'.*sum"):
        td.save(lazy, tmp_path / "parts.zarr")


@pytest.mark.parametrize("parts", ["token", ["attn", "mlp"]], ids=["token", "module"])
def test_featurize_parts__gradients_scaled_by_moments(parts: object) -> None:
    """The parts of scaled gradients add up to the scaled gradient."""
    moments = {"c0": {name: value.square() for name, value in state(7).items()}}
    scaled = model(1, second_moments=moments)
    whole, plain = (
        td.featurize(samples(), each, projector=td.Identity()) for each in (scaled, model(1))
    )
    found = td.featurize_parts(samples(), scaled, parts=parts, projector=td.Identity())
    expected = whole.feature.values
    assert not np.allclose(expected, plain.feature, rtol=0.1)
    summed = found.feature.sum(found.feature.dims[1]).values
    np.testing.assert_allclose(summed, expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max())
