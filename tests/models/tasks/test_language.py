"""Tasks whose samples have several terms: which they are, and a loop of ``backward()`` of each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import trakdask as td
from tests.models import engines
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
    for task in (CausalLM(labels="labels", position="token"), CausalLM()):
        sequence, position = task.tokens(data)
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


# ------------------------------------------- gradients against those of a sum of margins by hand

N, T = 5, 6


def margins(logits: Tensor, label: Tensor) -> Tensor:
    """log p/(1 - p) of labels, where these are at least 0."""
    p = logits.softmax(-1).gather(-1, label[..., None])[..., 0]
    return (p / (1 - p)).log()


def integers(*shape: int, high: int, seed: int = 0) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


MASK = (torch.arange(T) < torch.arange(2, N + 2)[:, None]).long()
IDS = integers(N, T, high=9) * MASK
LABELS = integers(N, T, high=4, seed=1)
LABELS[:, 0] = -100
PIXELS = integers(N, 4, 4, high=4, seed=2)
PIXELS[0, 1] = 255
IMAGES = torch.randn(N, 2, 4, 4, generator=torch.Generator().manual_seed(3)).double()
STARTS, ENDS = torch.tensor([0, 1, 0, 1, 2]), torch.tensor([1, 1, 2, 3, 5])
ANSWERS = integers(N, 4, high=9, seed=4)
ANSWERS[1, 2:] = -100


class Tagger(nn.Module):
    """Logits of each token, which see the other tokens."""

    def __init__(self, classes: int, wrap: Callable[[Tensor], Any] = lambda y: y) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, 5, dtype=torch.float64)
        self.head = nn.Linear(5, classes, dtype=torch.float64)
        self.wrap = wrap

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        weight = attention_mask[..., None].double()
        x = self.embed(input_ids) * weight
        return self.wrap(self.head(torch.tanh(x + x.sum(1, keepdim=True) / weight.sum(1)[:, None])))


class Pixels(nn.Module):
    def __init__(self, stride: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 4, 3, padding=1, stride=stride).double()

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        return {"aux": image, "out": self.conv(image)}


def spans(y: Tensor) -> Any:
    return SimpleNamespace(start_logits=y[..., 0], end_logits=y[..., 1])


def of_tokens(module: nn.Module, one: Batch) -> list[Tensor]:
    logits = module(one["input_ids"], one["attention_mask"])
    kept = (one["labels"] >= 0) & (one["attention_mask"] == 1)
    return [margins(logits[kept], one["labels"][kept])]


def of_token(module: nn.Module, one: Batch) -> list[Tensor]:
    logits, at = module(one["input_ids"], one["attention_mask"]), one["at"]
    return [margins(logits[0, at], one["labels"][0, at])]


def of_span(module: nn.Module, one: Batch) -> list[Tensor]:
    whole = module(one["input_ids"], one["attention_mask"])
    parts = whole.values() if isinstance(whole, dict) else vars(whole).values()
    names = "start_positions", "end_positions"
    return [margins(z, one[name]) for z, name in zip(parts, names, strict=True)]


def of_pixels(module: nn.Module, one: Batch) -> list[Tensor]:
    logits = functional.interpolate(module(one["image"])["out"], size=(4, 4), mode="bilinear")
    kept = one["labels"] < 255
    return [margins(logits.permute(0, 2, 3, 1)[kept], one["labels"][kept])]


def of_next_tokens(module: nn.Module, one: Batch, labels: str = "input_ids") -> list[Tensor]:
    logits, mask = module(one["input_ids"], one["attention_mask"])[0], one["attention_mask"]
    kept = (one[labels][:, 1:] != -100) & (mask[:, 1:] == 1) & (mask[:, :-1] == 1)
    return [margins(logits[:, :-1][kept], one[labels][:, 1:][kept])]


def of_next_token(module: nn.Module, one: Batch) -> list[Tensor]:
    logits, at = module(one["input_ids"], one["attention_mask"])[0], one["at"].long()
    return [margins(logits[0, at - 1], one["labels"][0, at])]


TEXT = {"input_ids": IDS, "attention_mask": MASK}
SPANS = Batch(TEXT, start_positions=STARTS, end_positions=ENDS)
TAGS = Batch(TEXT, labels=LABELS)
by_name = {"output": ("s", "e")}

WORDS, LABELLED = batch(), some_labels()
CASES = {
    "next tokens": (Running(), "causal_lm", WORDS, of_next_tokens),
    "next tokens, padded on the left": (
        Running(), "causal_lm", Batch(WORDS, attention_mask=WORDS["attention_mask"].flip(1)),
        of_next_tokens,
    ),
    "next tokens with labels": (
        Running(), CausalLM(labels="labels"), LABELLED,
        partial(of_next_tokens, labels="labels"),
    ),
    "a next token": (
        Running(), CausalLM(labels="labels", position="at"),
        Batch(LABELLED, at=torch.tensor([5, 3, 2, 2], dtype=torch.int32)), of_next_token,
    ),
    "tokens": (Tagger(4), "token_classification", TAGS, of_tokens),
    "a token": (
        Tagger(4), td.tasks.TokenClassification(position="at"),
        Batch(TAGS, at=torch.tensor([1, 1, 2, 1, 3])), of_token,
    ),
    "an answer": (Tagger(2, spans), "question_answering", SPANS, of_span),
    "an answer by name": (
        Tagger(2, lambda y: {"s": y[..., 0], "e": y[..., 1]}),
        td.tasks.QuestionAnswering(**by_name), SPANS, of_span,
    ),
    "pixels": (
        Pixels(), td.tasks.Segmentation(output="out"), Batch(image=IMAGES, labels=PIXELS),
        of_pixels,
    ),
    "pixels of fewer logits": (
        Pixels(2), td.tasks.Segmentation(output="out"), Batch(image=IMAGES, labels=PIXELS),
        of_pixels,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_output__is_the_sum_of_margins_and_q_the_mean_of_1_minus_p(
    check_gradients, case: str
) -> None:
    module, task, data, terms = CASES[case]
    _, q = check_gradients(module, task, data, lambda m, one: torch.cat(terms(m, one)).sum())
    alone = [Batch({n: x[i : i + 1] for n, x in data.items()}) for i in range(data.size)]
    expected = [torch.sigmoid(-torch.cat(terms(module, one))).mean() for one in alone]
    torch.testing.assert_close(q, torch.stack(expected).float())


def test_tokens__of_a_text_are_those_with_a_label() -> None:
    one = Batch({name: x[3:4] for name, x in TAGS.items()})
    sequence, position = td.tasks.TokenClassification().tokens(one)
    assert (sequence.tolist(), position.tolist()) == ([0] * 4, [1, 2, 3, 4])


T5 = transformers.T5Config(
    vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, dropout_rate=0,
    decoder_start_token_id=0, pad_token_id=0,
)  # fmt: skip


def test_seq2seq__gradients_and_loss_are_those_of_transformers(run) -> None:
    torch.manual_seed(0)
    module = transformers.T5ForConditionalGeneration(T5).eval().double()
    data = Batch(TEXT, labels=ANSWERS)

    def output(module: nn.Module, one: Batch) -> Tensor:
        kept = one["labels"] >= 0
        return margins(module(**one).logits[kept], one["labels"][kept]).sum()

    found, f, _ = run(module, "seq2seq", data)
    expected, values = engines.backward(module, output, data)
    torch.testing.assert_close(f, values.float())
    engines.equal(found, expected, rtol=1e-6)
    # With one token to predict, f says the loss of transformers.
    labels = torch.full_like(ANSWERS, -100)
    labels[:, 1] = ANSWERS[:, 1]
    _, f, q = run(module, "seq2seq", Batch(TEXT, labels=labels))
    for i in range(N):
        one = {name: x[i : i + 1] for name, x in {**TEXT, "labels": labels}.items()}
        loss = module(**one).loss.float()
        torch.testing.assert_close(functional.softplus(-f[i]), loss)
        torch.testing.assert_close(q[i], 1 - torch.exp(-loss))
