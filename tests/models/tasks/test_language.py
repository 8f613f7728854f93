"""Causal language models: which tokens they predict. Gradients: ``test_several_terms.py``."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trakdask as td
from trakdask.models.tasks import Batch, CausalLM
from trakdask.models.tasks.protocol import SampleError

VOCABULARY = 9


class Running(nn.Module):
    """Logits, or one reward, from the mean of the attended embeddings so far."""

    def __init__(self, n_out: int = VOCABULARY) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 5, dtype=torch.float64)
        self.head = nn.Linear(5, n_out, dtype=torch.float64)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor]:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        weight = mask[..., None].double()
        mean = (self.embed(input_ids) * weight).cumsum(1) / weight.cumsum(1).clamp(min=1)
        out = self.head(mean.tanh())
        return (out if out.shape[-1] > 1 else out[:, -1],)


def batch(n: int = 4, length: int = 6) -> Batch:
    ids = torch.randint(0, VOCABULARY, (n, length), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(length) < torch.arange(length, length - n, -1)[:, None]).long()
    return Batch(input_ids=ids, attention_mask=mask)


def some_labels() -> Batch:
    data = batch()
    labels = data["input_ids"].clone()
    labels[0, [1, 4]] = -100
    labels[1, :3] = -100
    labels[2, 2] = 7  # another token than the one that is there
    return Batch(data, labels=labels)


def test_causal_lm__longer_than_the_model_was_made_for(run) -> None:
    module = Running()
    module.config = type("Config", (), {"max_position_embeddings": 4})()
    data = batch(4)
    data["attention_mask"][1:, 4:] = 0
    with pytest.raises(SampleError, match=r"at most 4 tokens.*got 6 at sample 0\b"):
        run(module, "causal_lm", data)
    data["attention_mask"][:, 4:] = 0
    run(module, "causal_lm", data)


def test_causal_lm__reads_labels_where_there_are_some() -> None:
    """As transformers names them; a class per sequence is something else."""
    task = CausalLM()
    names = dict.fromkeys(task.inputs, 2)
    assert task.for_variables({**names, "labels": 2}) == CausalLM(labels="labels")
    assert task.for_variables({**names, "labels": 1}) == task
    assert CausalLM(labels="mine").for_variables({"labels": 2}).labels == "mine"
    data = some_labels()
    listed = td.tasks.CausalLM().tokens(data)
    expected = CausalLM(labels="labels").tokens(data)
    assert [each.tolist() for each in listed] == [each.tolist() for each in expected]


def test_tokens__lists_what_is_predicted() -> None:
    data = some_labels()
    expected = [
        (i, place)
        for i in range(4)
        for place in range(1, 6)
        if data["labels"][i, place] != -100
        and data["attention_mask"][i, place]
        and data["attention_mask"][i, place - 1]
    ]
    sequence, position = CausalLM(labels="labels", position="token").tokens(data)
    assert list(zip(sequence.tolist(), position.tolist(), strict=True)) == expected
    assert sequence.dtype == position.dtype == np.int64


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", "int64"])
def test_attention_mask__is_optional(dtype: str) -> None:
    """Samples without one are not padded; their features are those with a mask of ones."""
    ids = {"input_ids": batch()["input_ids"].numpy().astype(dtype)}
    model = td.Model(Running(), task="causal_lm")
    alone, masked = (
        td.featurize(td.from_arrays(ids | more), model, projector=td.Identity()).compute()
        for more in ({}, {"attention_mask": np.ones((4, 6), int)})
    )
    np.testing.assert_array_equal(alone.feature, masked.feature)
    assert td.score(alone, masked, td.Trak(damping=1.0)).shape == (4, 4)
