"""Preferences against a loop written as in the papers, and planted contradictions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

import trakdask as td
from trakdask.models.tasks import Batch, CausalLM, Forward, Preference, Reward

VOCABULARY = 9


class Answering(nn.Module):
    """Logits, or one reward, from the mean of the attended embeddings so far."""

    def __init__(self, n_out: int = VOCABULARY) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 6, dtype=torch.float64)
        self.head = nn.Linear(6, n_out, dtype=torch.float64)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        weight = mask[..., None].double()
        mean = (self.embed(input_ids) * weight).cumsum(1) / weight.cumsum(1).clamp(min=1)
        out = self.head(mean.tanh())
        return out if out.shape[-1] > 1 else out[:, -1]


def pairs(n: int = 4, length: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(1)
    data = {
        f"{side}_input_ids": torch.randint(0, VOCABULARY, (n, length), generator=generator)
        for side in ("chosen", "rejected")
    }
    for shift, side in enumerate(("chosen", "rejected")):
        labels = data[f"{side}_input_ids"].clone()
        labels[:, :2] = -100  # the prompt
        ends = torch.arange(length, length - n, -1)[:, None].clamp(min=4) - shift
        data[f"{side}_attention_mask"] = (torch.arange(length) < ends).long()
        data[f"{side}_labels"] = labels
        data[f"ref_{side}_logps"] = torch.randn(n, generator=generator)
    return Batch(data)


def without(*words: str) -> Batch:
    return Batch({n: t for n, t in pairs().items() if not any(word in n for word in words)})


def log_probability(module: nn.Module, sample: Batch, side: str) -> Tensor:
    """Return log π of one answer, token by token."""
    ids = sample[f"{side}_input_ids"]
    mask = sample.get(f"{side}_attention_mask", torch.ones_like(ids))
    labels = sample.get(f"{side}_labels", ids)
    log_p = module(ids, mask)[0].log_softmax(-1)
    total = log_p.new_zeros(())
    for place in range(1, ids.shape[1]):
        if labels[0, place] != -100 and mask[0, place] and mask[0, place - 1]:
            total = total + log_p[place - 1, labels[0, place]]
    return total


def dpo(module: nn.Module, sample: Batch) -> Tensor:
    f = log_probability(module, sample, "chosen") - log_probability(module, sample, "rejected")
    reference = (sample.get(f"ref_{side}_logps", torch.zeros(1)) for side in ("chosen", "rejected"))
    of_chosen, of_rejected = (x[0].double() for x in reference)
    return 0.3 * (f - (of_chosen - of_rejected))


def reward(module: nn.Module, sample: Batch) -> Tensor:
    chosen, rejected = (
        module(sample[f"{side}_input_ids"], sample[f"{side}_attention_mask"])[0, 0]
        for side in ("chosen", "rejected")
    )
    return chosen - rejected


def bound(task: Preference, data: Batch) -> Preference:
    return task.for_variables({name: tensor.ndim for name, tensor in data.items()})


CASES: dict[str, tuple[Preference, Batch, int, Callable[[nn.Module, Batch], Tensor]]] = {
    "dpo": (Preference(beta=0.3), pairs(), VOCABULARY, dpo),
    "no mask": (Preference(beta=0.3), without("mask"), VOCABULARY, dpo),
    "no labels": (Preference(beta=0.3), without("labels"), VOCABULARY, dpo),
    "no reference": (Preference(beta=0.3), without("ref_"), VOCABULARY, dpo),
    "reward": (Reward(), without("labels", "ref_"), 1, reward),
}


@pytest.mark.parametrize("case", CASES)
def test_preference__gradients(check_gradients, case: str) -> None:
    task, data, n_out, output = CASES[case]
    check_gradients(Answering(n_out), bound(task, data), data, output)


@pytest.mark.parametrize("case", CASES)
def test_preference__out_to_loss_is_the_derivative_of_the_loss(run, case: str) -> None:
    task, data, n_out, output = CASES[case]
    module = Answering(n_out)
    _, f, q = run(module, bound(task, data), data, "loop")
    for row in range(len(f)):
        value = output(module, Batch({n: t[row : row + 1] for n, t in data.items()}))
        leaf = value.detach().requires_grad_()
        (slope,) = torch.autograd.grad(-logsigmoid(leaf), leaf)
        torch.testing.assert_close(q[row].double(), -slope, rtol=1e-6, atol=1e-7)


def test_preference__an_answer_without_tokens_is_an_error(run) -> None:
    data = pairs()
    data["rejected_labels"][2] = -100
    with pytest.raises(ValueError, match="sample"):
        run(Answering(), bound(Preference(), data), data, "loop")


def test_reward__of_a_language_model_is_an_error(run) -> None:
    data = without("labels", "ref_")
    with pytest.raises(ValueError, match="num_labels=1"):
        run(Answering(), bound(Reward(), data), data, "loop")


def test_planted_contradictions__have_the_largest_self_influence() -> None:
    """Answers that begin with a small word are preferred, but for one pair in ten."""
    rng = np.random.default_rng(0)
    n, prompt = 200, rng.integers(0, VOCABULARY, (200, 2))
    good, bad = rng.integers(0, 4, (n, 1)), rng.integers(4, VOCABULARY, (n, 1))
    ends = rng.integers(0, VOCABULARY, (2, n, 2))
    is_wrong = rng.random(n) < 0.1
    good, bad = np.where(is_wrong[:, None], bad, good), np.where(is_wrong[:, None], good, bad)
    arrays = {}
    for side, word, end in (("chosen", good, ends[0]), ("rejected", bad, ends[1])):
        ids = np.concatenate([prompt, word, end], axis=1)
        arrays[f"{side}_input_ids"] = ids
        arrays[f"{side}_labels"] = np.where(np.arange(5) < 2, -100, ids)
    samples = td.from_arrays(arrays, chunks=64)
    data = Batch({name: torch.tensor(array) for name, array in arrays.items()})
    task = bound(Preference(beta=1.0, language=CausalLM()), data)
    states = []
    for seed in range(3):
        module = Answering()
        torch.manual_seed(seed)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.3)
        optimiser = torch.optim.Adam(module.parameters(), lr=0.02)
        forward = Forward(module, dict(module.named_parameters()), {})
        for _ in range(60):
            optimiser.zero_grad()
            (-logsigmoid(task.output(forward, data))).mean().backward()
            optimiser.step()
        states.append(module.state_dict())
    features = td.featurize(samples, td.Model(Answering, states, task=task), td.SJLT(64))
    influence = td.self_influence(features).compute()
    auc = td.evaluate.mislabelled_curve(influence, is_wrong).compute().auc
    assert float(auc) > 0.9
