"""Cut padding is invisible: models against themselves on whole rows, one at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn

import trakdask as td
from tests.models.language_models import VOCABULARY, bert, gpt2, llama, transformers
from trakdask.models.padding import order_by_length, trimmed
from trakdask.models.tasks import Batch, CausalLM, TextClassification

LENGTH = 24


class Mean(nn.Module):
    """A classifier that takes the mean over all tokens, padding included."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.embedding(input_ids).mean(1))


def samples(side: str = "right", n: int = 4) -> xr.Dataset:
    random = np.random.default_rng(0)
    lengths = random.integers(2, 12, n)
    mask = (np.arange(LENGTH) < lengths[:, None]).astype(np.int64)
    ids = random.integers(3, VOCABULARY, (n, LENGTH)) * mask
    turn = -1 if side == "left" else 1
    arrays = {"input_ids": ids, "attention_mask": mask, "tokens": np.where(mask == 1, ids, -100)}
    arrays = {name: values[:, ::turn] for name, values in arrays.items()}
    coords = {"label": np.arange(n) % 3, "row": np.arange(n)}
    return td.from_arrays(arrays, coords=coords, chunks=4)


def features(data: xr.Dataset, model: td.Model, **options: object) -> xr.Dataset:
    found = td.featurize(data, model, projector=td.Identity(), **options)
    return found.compute(scheduler="sync")


def alone(data: xr.Dataset, model: td.Model) -> xr.Dataset:
    """Gradients of whole rows, padding included: one sample, one ``loop`` pass at a time."""
    rows = [features(data.isel(sample=[i]), model, gradients="loop") for i in range(len(data.row))]
    return xr.concat(rows, "sample")


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The shapes of the token ids that a model computes."""
    shapes: list[tuple[int, int]] = []
    original = transformers.LlamaForCausalLM.forward

    def forward(self, input_ids, *args, **kwargs):
        shapes.append(tuple(input_ids.shape))
        return original(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", forward)
    return shapes


CASES = {
    "llama": (llama, CausalLM()),
    "gpt2": (gpt2, CausalLM()),
    "gpt2, labels": (gpt2, CausalLM(labels="tokens")),
    "bert": (bert, TextClassification()),
    "mean": (Mean, TextClassification()),
}


@pytest.mark.parametrize(
    ("case", "side"),
    [
        *((case, "right") for case in CASES if case != "gpt2"),  # it has a row with labels
        *(("gpt2", "left"), ("bert", "left")),  # of which nothing is cut
    ],
)
def test_trimmed__is_invisible(case: str, side: str) -> None:
    build, task = CASES[case]
    model, data = td.Model(build().double(), task=task), samples(side)
    expected = alone(data, model)
    for options in ({"batch_size": 2}, {"gradients": "loop", "batch_size": 3}):
        found = features(data, model, **options)
        assert found.row.values.tolist() == list(range(4))
        for name in ("feature", "output", "out_to_loss"):
            scale = np.abs(expected[name].values).max()
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-6, atol=1e-6 * scale)


def test_trimmed__long_sequences_are_computed_together(widths: list[tuple[int, int]]) -> None:
    data = samples(n=12).chunk(sample=12)
    lengths = np.sort(data.attention_mask.sum("attention_mask_dim_1").values)[::-1]
    td.featurize(data, td.Model(llama(), task="causal_lm"), batch_size=4).compute(scheduler="sync")
    expected = [(4, int(part.max())) for part in np.split(lengths, 3)]
    computed = [width for width in widths if width[0] == 4 and width[1] < LENGTH]
    assert list(dict.fromkeys(computed)) == list(dict.fromkeys(expected))


def test_order_by_length__and_what_is_cut() -> None:
    mask = np.array([[1, 0, 0, 0], [0, 0, 0, 0], [0, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 0]])
    task = CausalLM(labels="labels")
    assert order_by_length(task, {"attention_mask": mask}).tolist() == [4, 2, 3, 0, 1]
    assert order_by_length(CausalLM("input_ids"), {"input_ids": mask}) is None
    assert order_by_length(TextClassification("x"), {"x": mask}) is None
    names = {"input_ids": mask, "attention_mask": mask, "labels": mask, "other": mask}
    batch = Batch({name: torch.from_numpy(value) for name, value in names.items()})
    assert {n: v.shape[1] for n, v in trimmed(task, batch).items()} == {
        "input_ids": 3, "attention_mask": 3, "labels": 3, "other": 4,
    }  # fmt: skip
    empty = Batch({name: value[1:2] for name, value in batch.items()})
    assert trimmed(task, empty)["input_ids"].shape == (1, 2)


def test_trimmed__failures_name_the_sample() -> None:
    data = samples(n=12).load(scheduler="sync")
    data.input_ids[9, 1] = VOCABULARY
    data.attention_mask[4] = 0
    data, model = data.chunk(sample=6), td.Model(llama(), task="causal_lm")
    found = features(data, model, on_error="record", batch_size=3)
    assert np.flatnonzero(found.error.values[:, 0] != "").tolist() == [4, 9]
    assert "got 0 tokens" in found.error.values[4, 0]
    with pytest.raises(td.errors.BlockError, match=r"sample 1\b"):
        features(data.isel(sample=slice(3, 5)), model)
