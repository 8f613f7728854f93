"""score_parts against float64 loops, explicit matrices and explicit solutions."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn

import trakdask as td
from tests.laziness import raise_if_dask_computes
from tests.models.test_tokens import LENGTH, TASK, VOCABULARY, Gpt
from tests.models.token_oracle import contributions
from tests.projection.reference import explicit
from trakdask.featurization import block
from trakdask.models.tasks import Batch, Forward
from trakdask.parts import products as divided
from trakdask.projection import Projector, RowMap


def state(seed: int, build: type[nn.Module] = Gpt) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return build().state_dict()


def model(n: int = 2, **options) -> td.Model:
    return td.Model(Gpt, {f"c{i}": state(i) for i in range(n)}, task=TASK, **options)


def samples(n: int = 5, chunks: int = 2) -> xr.Dataset:
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (n, LENGTH))
    return td.from_arrays({"input_ids": ids}, coords={"source": list("abcde")[:n]}, chunks=chunks)


class AcrossTokens(nn.Module):
    """A layer without a rule that looks at the token before: it has no terms of single tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1) * self.weight


class Mixed(Gpt):
    def __init__(self) -> None:
        super().__init__()
        self.own = AcrossTokens()


DAMPING = 300.0
PROJECTORS = [td.Identity(), td.SJLT(64)]
TRAIN = td.from_arrays(
    {"input_ids": np.random.default_rng(1).integers(0, VOCABULARY, (8, LENGTH))},
    coords={"source": list("abababab")},
    chunks=3,
)
ASKED = samples(3).rename(source="kind")


def ids(ds: xr.Dataset) -> np.ndarray:
    return ds.input_ids.values


@functools.cache
def token_gradients(checkpoint: int, ids: tuple[tuple[int, ...], ...]) -> dict[str, np.ndarray]:
    """Gradients of each parameter at each token, (sample, token, element)."""
    module = double_module(checkpoint)
    found = contributions(module, TASK, Batch(input_ids=torch.tensor(ids)), LENGTH)
    return {name: gradient.numpy() for name, gradient in found.items()}


def double_module(checkpoint: int) -> nn.Module:
    module = Gpt()
    module.load_state_dict(state(checkpoint))
    return module.double().eval()


class Oracle:
    """Everything in float64, one checkpoint at a time, with the explicit projection matrix."""

    def __init__(self, projector: Projector, checkpoint: int = 0, **options: object) -> None:
        made = model(2, **options)
        shapes = made.shapes
        rows = RowMap.from_shapes(shapes, alignment=projector.row_alignment)
        matrix = explicit(projector, rows, made.checkpoints[checkpoint].id).numpy()
        spans = [np.arange(rows.size(n)) + rows.offset(n) for n in rows.names]
        self.matrix, self.names = matrix[np.concatenate(spans)], list(shapes)
        self.checkpoint = checkpoint

    def gradients(self, ds: xr.Dataset) -> np.ndarray:
        """(sample, token, parameter)."""
        found = token_gradients(self.checkpoint, tuple(map(tuple, ids(ds).tolist())))
        return np.concatenate([found[name] for name in self.names], axis=2)

    def tokens(self, ds: xr.Dataset) -> np.ndarray:
        return self.gradients(ds) @ self.matrix

    def whole(self, ds: xr.Dataset) -> np.ndarray:
        return self.tokens(ds).sum(1)

    def q(self, ds: xr.Dataset) -> np.ndarray:
        module = double_module(self.checkpoint)
        forward = Forward(module, dict(module.named_parameters()), dict(module.named_buffers()))
        batch = Batch(input_ids=torch.tensor(ids(ds)))
        return TASK.out_to_loss(forward, batch).detach().numpy()

    def solved(self, vectors: np.ndarray) -> np.ndarray:
        x = self.whole(TRAIN)
        return np.linalg.solve(x.T @ x + DAMPING * np.eye(x.shape[1]), vectors.T).T


def lazy_sides(projector: Projector, n: int = 2) -> tuple[xr.Dataset, xr.Dataset]:
    features, targets = (td.featurize(each, model(n), projector) for each in (TRAIN, ASKED))
    return features, targets


def sides(projector: Projector, n: int = 2) -> tuple[xr.Dataset, xr.Dataset]:
    features, targets = lazy_sides(projector, n)
    return features.compute(), targets.compute()


def ask(features: xr.Dataset, targets: xr.Dataset, n: int = 2, **options: object) -> xr.DataArray:
    estimator = td.Trak(damping=td.Absolute(DAMPING))
    return td.score_parts(features, targets, model(n), estimator, **options)  # type: ignore[arg-type]


def assert_near(found: xr.DataArray, expected: np.ndarray, rounding: float = 1e-3) -> None:
    assert found.shape == expected.shape
    scale = float(np.abs(expected).max())
    assert scale > 0
    np.testing.assert_allclose(found.values, expected, rtol=0, atol=rounding * scale)


@pytest.mark.parametrize("projector", PROJECTORS, ids=lambda p: type(p).__name__)
def test_score_parts__words_of_training_samples_against_the_oracle(
    projector: Projector,
) -> None:
    features, targets = sides(projector)
    top = [6, 1]
    found = ask(features, targets, of=TRAIN.isel(sample=top))
    assert found.dims == ("sample", "token", "target")
    products, weights = [], []
    for checkpoint in (0, 1):
        oracle = Oracle(projector, checkpoint)
        solved = oracle.solved(oracle.whole(ASKED))
        products.append(oracle.tokens(TRAIN.isel(sample=top)) @ solved.T)
        weights.append(oracle.q(TRAIN.isel(sample=top)))
    expected = np.mean(products, 0) * np.mean(weights, 0)[:, None, None]
    assert_near(found, expected)
    whole = td.score(features, targets, td.Trak(damping=td.Absolute(DAMPING))).isel(sample=top)
    assert_near(found.sum("token"), whole.values)


def test_score_parts__words_of_targets_against_the_oracle() -> None:
    projector = td.SJLT(proj_dim=64)
    features, targets = sides(projector)
    found = ask(features, ASKED, of=features.isel(sample=[6, 1]))
    assert found.dims == ("sample", "target", "token")
    by_source = ask(features, ASKED, by="source")
    assert by_source.dims == ("source", "target", "token")
    products, weights = [], []
    for checkpoint in (0, 1):
        oracle = Oracle(projector, checkpoint)
        tokens = oracle.solved(oracle.tokens(ASKED).reshape(-1, oracle.matrix.shape[1]))
        tokens = tokens.reshape(3, LENGTH, -1)
        products.append(np.einsum("zp,tkp->ztk", oracle.whole(TRAIN), tokens))
        weights.append(oracle.q(TRAIN))
    every = np.mean(products, 0) * np.mean(weights, 0)[:, None, None]
    assert_near(found, every[[6, 1]])
    assert_near(by_source, np.stack([every[::2].sum(0), every[1::2].sum(0)]))
    assert by_source.source.values.tolist() == ["a", "b"]
    whole = td.score(features, targets, td.Trak(damping=td.Absolute(DAMPING)))
    assert_near(ask(features, ASKED).sum("token"), whole.values)


def test_score_parts__modules_against_the_oracle() -> None:
    projector = td.SJLT(64)
    features, targets = sides(projector, 1)
    parts = {"in": ["wte*", "wpe*"], "up": "mlp.0*"}
    found = ask(features, targets, 1, of=TRAIN, parts=parts)
    assert found.dims == ("sample", "module", "target")
    oracle = Oracle(projector)
    patterns = {"in": "wte|wpe", "up": "mlp.0"}
    solved = oracle.solved(oracle.whole(ASKED))
    start, masks = 0, {title: np.zeros(len(oracle.matrix)) for title in found.module.values}
    for name, shape in model(1).shapes.items():
        stop = start + int(np.prod(shape))
        inside = [t for t in masks if any(p in name for p in patterns.get(t, "-").split("|"))]
        masks[inside[0] if inside else "others"][start:stop] = 1
        start = stop
    gradients = oracle.gradients(TRAIN).sum(1)
    parts_of = [(gradients * mask) @ oracle.matrix @ solved.T for mask in masks.values()]
    assert_near(found, np.stack(parts_of, 1) * oracle.q(TRAIN)[:, None, None])


ESTIMATORS = {
    "trak": td.Trak(damping=0.1),
    "soft": td.Soft(damping=0.1, power=0.5),
    "grad_dot": "grad_dot",
    "tracin": td.TracIn({"c0": 0.1, "c1": 0.3}),
    "relatif": td.RelatIF(damping=0.1),
}


@pytest.mark.parametrize(
    ("name", "projector", "rounding"),
    [
        *((name, td.SJLT(64), 2e-3) for name in ESTIMATORS),
        ("soft", td.Rademacher(64, arithmetic="int8x3"), 2e-5),  # rounds to 22 bits, and not to 14
    ],
)
def test_score_parts__every_estimator_adds_up_but_for_the_rounding_of_the_projection(
    name: str, projector: Projector, rounding: float
) -> None:
    options = {"estimator": ESTIMATORS[name], "average": False}
    features, targets = sides(projector)
    made, some = model(), [2, 3]
    if name != "relatif":
        words = td.score_parts(features, targets, made, of=TRAIN.isel(sample=some), **options)
        expected = td.score(features, targets, **options).isel(sample=some)
        assert_near(words.sum("token").transpose(*expected.dims), expected.values, rounding)
    few = features.isel(sample=[4, 0])
    prompts = td.score_parts(features, ASKED, made, of=few, **options)
    expected = td.score(features, targets, **options).isel(sample=[4, 0])
    assert_near(prompts.sum("token").transpose(*expected.dims), expected.values, rounding)


def test_score_parts__blocks_and_chunks_of_targets_do_not_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    features, targets = sides(td.SJLT(64))
    parts = ["attn", "mlp"]
    expected = ask(features, targets, of=TRAIN, parts=parts).compute()
    many = targets.chunk(sample=1)
    again = ask(features, many, of=TRAIN.chunk(sample=5), parts=parts)
    assert_near(again, expected.values, 1e-5)
    monkeypatch.setattr(divided, "_VECTOR_BYTES", 1)
    apart = ask(features, targets, of=TRAIN, parts=parts)
    assert apart.chunks[2] == (1, 1, 1)
    assert_near(apart, expected.values, 1e-5)


def test_score_parts__wide_features_leave_micro_batches_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Products with few vectors take little memory, however wide the features of samples are."""
    features, targets = sides(td.SJLT(2048), 1)
    monkeypatch.setattr(block, "budget_bytes", lambda *_: 2**21)
    with caplog.at_level("INFO", "trakdask"):
        ask(features, targets, 1, of=TRAIN).compute(scheduler="sync")
    assert any(message.startswith("gradients by") for message in caplog.messages)
    assert "save memory" not in caplog.text


def test_score_parts__is_lazy_and_labelled() -> None:
    words = [f"w{i}" for i in range(VOCABULARY)]
    with raise_if_dask_computes():
        features, targets = lazy_sides(td.SJLT(32))
        lazy = ask(features, targets, of=TRAIN.isel(sample=[1, 4]), text=words)
        prompts = ask(features, ASKED, of=features.isel(sample=[1, 4]), text=words)
    assert lazy.source.values.tolist() == ["b", "a"]
    assert lazy.target_kind.values.tolist() == list("abc")
    assert lazy.text.values[1, 2] == f"w{ids(TRAIN)[4, 2]}"
    np.testing.assert_array_equal(lazy.input_ids, ids(TRAIN)[[1, 4]])
    assert prompts.source.values.tolist() == ["b", "a"]
    assert prompts.target_text.dims == ("target", "token")
    assert prompts.target_text.values[1, 2] == f"w{ids(ASKED)[1, 2]}"
    assert prompts.attrs["estimator"] == lazy.attrs["estimator"] == "trak"


class Classifier(nn.Module):
    """The head sees the mean of the tokens that are no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.layer = nn.Embedding(VOCABULARY, 6), nn.Linear(6, 6)
        self.pooler, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x, mask = torch.tanh(self.layer(self.wte(input_ids))), attention_mask[..., None]
        return self.head(torch.tanh(self.pooler((x * mask).sum(1) / mask.sum(1))))


class Tokenizer:
    """Is called with texts, as tokenizers of transformers are, and decodes ids."""

    def __call__(self, text: str) -> list[int]:
        raise ValueError(f"expected a text, got {text}")

    def decode(self, number: int) -> str:
        return f"<{number}>"


@pytest.mark.parametrize(("divides", "length"), [("of", LENGTH), ("of", 1), ("targets", LENGTH)])
def test_score_parts__pooled_layers_are_the_last_part(divides: str, length: int) -> None:
    values, lengths = ids(samples(5))[:, :length], np.array([7, 3, 5, 4, 2])
    mask = (np.arange(length) < lengths[:, None]).astype(int)
    padded = td.from_arrays(
        {"input_ids": values * mask, "attention_mask": mask, "label": np.arange(5) % 3}, chunks=2
    )
    made = td.Model(Classifier, {"c0": state(0, Classifier)}, task=td.tasks.TextClassification())
    features = td.featurize(padded, made, projector=td.Identity()).compute()
    sides = (features, padded) if divides == "targets" else (features, features)
    of = {"of": padded} if divides == "of" else {}
    ask = functools.partial(td.score_parts, *sides, made, td.Trak(damping=0.1), **of)
    words, prefix = ask(text=Tokenizer()), "" if divides == "of" else "target_"
    assert words.sizes["token"] == length + 1
    expected = td.score(features, features, td.Trak(damping=0.1))
    assert_near(words.sum("token").transpose(*expected.dims), expected.values)
    head = ask(parts={"head": ["pooler*", "head*"]}).sel(module="head")
    assert_near(words.isel(token=-1), head.values)
    texts, shown = words[f"{prefix}text"].values, words[f"{prefix}attention_mask"].values
    assert texts[1].tolist() == [*(f"<{i}>" for i in padded.input_ids.values[1]), "[others]"]
    assert (words[f"{prefix}input_ids"].values[:, -1] == -1).all()
    np.testing.assert_array_equal(shown, np.c_[mask, np.ones(5)])


def test_score_parts__failed_samples_and_targets_are_nan() -> None:
    features, targets = sides(td.SJLT(32))
    values = ids(TRAIN).copy()
    values[3, 2] = VOCABULARY
    broken = td.from_arrays({"input_ids": values}, chunks=3)
    good = ask(features, targets, of=TRAIN).compute()
    found = ask(features, targets, of=broken, on_error="record").compute()
    assert found[3].isnull().all()
    assert "IndexError" in str(found.error.values[3])
    assert (found.error.drop_isel(sample=3) == "").all()
    assert_near(found.drop_isel(sample=3), good.drop_isel(sample=3).values, 1e-5)
    with pytest.raises(td.errors.BlockError, match="samples 3:6 "):
        ask(features, targets, of=broken).compute()
    failed = targets.copy(deep=True)
    failed.feature[1] = np.nan
    apart = ask(features, failed, of=TRAIN).compute()
    assert apart[..., 1].isnull().all()
    assert_near(apart[..., [0, 2]], good.values[..., [0, 2]], 1e-5)
    prompts = ask(features, broken, on_error="record").compute()
    assert prompts[:, 3].isnull().all()
    assert (prompts.target_error != "").values.tolist() == [i == 3 for i in range(8)]


def test_score_parts__a_layer_that_mixes_tokens_is_found_by_its_sum() -> None:
    mixed = td.Model(Mixed, [state(0, Mixed)], task=TASK)
    features = td.featurize(TRAIN, mixed, projector=td.SJLT(16)).compute()
    with pytest.raises(td.errors.BlockError, match=r"own\.weight"):
        td.score_parts(features, features, mixed, td.Trak(damping=0.1), of=TRAIN).compute()
