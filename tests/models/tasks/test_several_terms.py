"""Tasks whose samples have several terms, against a loop of ``backward()`` of plain functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import trakdask as td
from tests.models import engines
from tests.models.tasks.test_language import Running, some_labels
from tests.models.tasks.test_language import batch as language_batch
from trakdask.models.tasks import Batch

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

WORDS, LABELLED = language_batch(), some_labels()
CASES = {
    "next tokens": (Running(), "causal_lm", WORDS, of_next_tokens),
    "next tokens, padded on the left": (
        Running(), "causal_lm", Batch(WORDS, attention_mask=WORDS["attention_mask"].flip(1)),
        of_next_tokens,
    ),
    "next tokens with labels": (
        Running(), td.tasks.CausalLM(labels="labels"), LABELLED,
        partial(of_next_tokens, labels="labels"),
    ),
    "a next token": (
        Running(), td.tasks.CausalLM(labels="labels", position="at"),
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

    found, f, q = run(module, "seq2seq", data)
    expected, values = engines.backward(module, output, data)
    torch.testing.assert_close(f, values.float())
    engines.equal(found, expected, rtol=1e-6)
    # With one token to predict, f says the loss of transformers.
    for at in range(2):
        labels = torch.full_like(ANSWERS, -100)
        labels[:, at] = ANSWERS[:, at]
        _, f, q = run(module, "seq2seq", Batch(TEXT, labels=labels))
        for i in range(N):
            one = {name: x[i : i + 1] for name, x in {**TEXT, "labels": labels}.items()}
            loss = module(**one).loss.float()
            torch.testing.assert_close(functional.softplus(-f[i]), loss)
            torch.testing.assert_close(q[i], 1 - torch.exp(-loss))
