"""Causal language models against a loop over tokens, written as in the paper."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import trakdask as td
from trakdask.models.tasks import Batch, CausalLM
from trakdask.models.tasks.protocol import SampleError

VOCABULARY = 9


class Running(nn.Module):
    """Logits from the mean of the attended embeddings so far."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 5, dtype=torch.float64)
        self.head = nn.Linear(5, VOCABULARY, dtype=torch.float64)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor]:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        weight = mask[..., None].double()
        mean = (self.embed(input_ids) * weight).cumsum(1) / weight.cumsum(1).clamp(min=1)
        return (self.head(mean.tanh()),)


def batch(n: int = 4, length: int = 6) -> Batch:
    ids = torch.randint(0, VOCABULARY, (n, length), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(length) < torch.arange(length, length - n, -1)[:, None]).long()
    return Batch(input_ids=ids, attention_mask=mask)


def margins(module: nn.Module, sample: Batch, labels: str = "input_ids") -> list[Tensor]:
    """log p/(1-p) of every predicted token of one sequence: places, one after the other."""
    logits = module(sample["input_ids"], sample["attention_mask"])[0][0]
    found = []
    for place in range(1, len(logits)):
        label, mask = int(sample[labels][0, place]), sample["attention_mask"][0]
        if label != -100 and mask[place] and mask[place - 1]:
            p = logits[place - 1].softmax(0)[label]
            found.append((p / (1 - p)).log())
    return found


def some_labels() -> Batch:
    data = batch()
    labels = data["input_ids"].clone()
    labels[0, [1, 4]] = -100
    labels[1, :3] = -100
    labels[2, 2] = 7  # another token than the one that is there
    return Batch(data, labels=labels)


GRADIENTS = {
    "tokens": (CausalLM(), batch(), lambda module, sample: sum(margins(module, sample))),
    "labels": (
        CausalLM(labels="labels"),
        some_labels(),
        lambda module, sample: sum(margins(module, sample, "labels")),
    ),
    "position": (
        CausalLM(position="token"),
        Batch(batch(), token=torch.tensor([5, 1, 3, 2], dtype=torch.int32)),
        lambda module, sample: margins(module, sample)[int(sample["token"][0]) - 1],
    ),
}


@pytest.mark.parametrize("case", GRADIENTS)
def test_causal_lm__gradients(check_gradients, case: str) -> None:
    check_gradients(Running(), *GRADIENTS[case])


def test_causal_lm__labels_as_in_transformers(run) -> None:
    """Not shifted, -100 ignored: the loss is the usual one, and Q its slope by the output."""
    data = some_labels()
    data["attention_mask"] = torch.ones_like(data["attention_mask"])
    logits = Running()(**{n: data[n] for n in ("input_ids", "attention_mask")})[0][:, :-1].detach()
    target = data["labels"][:, 1:]
    kept = target != -100
    epsilon = torch.zeros(len(target), dtype=torch.float64, requires_grad=True)
    right = functional.one_hot(target.clamp(min=0), VOCABULARY) * kept[..., None]
    raised = logits + epsilon[:, None, None] * right  # every margin rises by epsilon
    loss = functional.cross_entropy(raised.transpose(1, 2), target, reduction="sum")
    (slope,) = torch.autograd.grad(loss, epsilon)
    _, _, q = run(Running(), CausalLM(labels="labels"), data)
    torch.testing.assert_close(q, (-slope / kept.sum(1)).float())


@pytest.mark.parametrize("side", ["left", "right"])
def test_causal_lm__padding_adds_nothing(run, side: str) -> None:
    data = batch(n=1)
    junk = torch.tensor([[3, 8, 8]])
    parts = {"input_ids": junk, "attention_mask": torch.zeros_like(junk)}
    padded = Batch(
        {
            name: torch.cat([parts[name], value] if side == "left" else [value, parts[name]], 1)
            for name, value in data.items()
        }
    )
    expected, found = (run(Running(), "causal_lm", d) for d in (data, padded))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


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


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_causal_lm__tokens_add_up_to_their_sequence(run, engine: str) -> None:
    data, task = some_labels(), CausalLM(labels="labels")
    sequence, position = task.tokens(data)
    rows = Batch({name: value[sequence] for name, value in data.items()})
    rows["token"] = torch.from_numpy(position)
    tokens = run(Running(), CausalLM(labels="labels", position="token"), rows, engine)
    whole = run(Running(), task, data, engine)
    index = torch.from_numpy(sequence)
    for name, expected in whole[0].items():
        found = torch.zeros_like(expected).index_add_(0, index, tokens[0][name])
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    n_tokens = torch.bincount(index)
    torch.testing.assert_close(torch.zeros(4).index_add_(0, index, tokens[1]), whole[1])
    torch.testing.assert_close(torch.zeros(4).index_add_(0, index, tokens[2]) / n_tokens, whole[2])


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
