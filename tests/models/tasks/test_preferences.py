"""Preferences against a loop written as in the papers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from tests.models.tasks.test_language import VOCABULARY, Running
from trakdask.models.tasks import Batch, Preference, Reward


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
    log_p = module(ids, mask)[0][0].log_softmax(-1)
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
        module(sample[f"{side}_input_ids"], sample[f"{side}_attention_mask"])[0][0, 0]
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
def test_preference__gradients_and_the_slope_of_the_loss(check_gradients, case: str) -> None:
    task, data, n_out, output = CASES[case]
    f, q = check_gradients(Running(n_out), bound(task, data), data, output)
    leaf = f.requires_grad_()
    (slope,) = torch.autograd.grad(-logsigmoid(leaf).sum(), leaf)
    torch.testing.assert_close(q, -slope, rtol=1e-6, atol=1e-7)


def test_preference__an_answer_without_tokens_is_an_error(run) -> None:
    data = pairs()
    data["rejected_labels"][2] = -100
    with pytest.raises(ValueError, match="sample"):
        run(Running(), bound(Preference(), data), data, "loop")


def test_reward__of_a_language_model_is_an_error(run) -> None:
    data = without("labels", "ref_")
    with pytest.raises(ValueError, match="num_labels=1"):
        run(Running(), bound(Reward(), data), data, "loop")
