"""New targets are what featurizing and scoring them would have given."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from PIL import Image
from torch import nn

import trakdask as td
from trakdask.explorer import Explorer
from trakdask.explorer.new_targets import MOST_BYTES, decoded_image
from trakdask.explorer.view import View

N, M, SIDE, CLASSES = 40, 6, 4, 3
PROJECTOR = td.Rademacher(proj_dim=32, seed=3)


def images(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, SIDE, SIDE, 3), np.uint8)


def prepared(image: Any) -> np.ndarray:
    return np.asarray(image, np.float32).transpose(2, 0, 1) / 255


def samples(n: int, seed: int) -> xr.Dataset:
    arrays = np.stack([prepared(image) for image in images(n, seed)])
    coords = {
        "label": np.arange(n) % CLASSES,
        "source": np.array(["web", "book"], object)[np.arange(n) % 2],
        "year": 2000 + np.arange(n),
        "is_old": np.arange(n) < 3,
        "day": np.datetime64("2020-01-01", "ns") + np.arange(n).astype("m8[D]"),
    }
    return td.from_arrays({"image": arrays}, coords=coords)


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE**2, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def states(n: int = 3) -> dict[str, Any]:
    by_name = {}
    for seed in range(n):
        torch.manual_seed(seed)
        by_name[f"seed {seed}"] = network().state_dict()
    return by_name


def probabilities(x: np.ndarray) -> np.ndarray:
    """Return the probabilities of all classes, (sample, class), the mean over checkpoints."""
    nets = [network() for _ in states()]
    for net, state in zip(nets, states().values(), strict=True):
        net.load_state_dict(state)
    outputs = [net(torch.from_numpy(x)).softmax(1).detach().numpy() for net in nets]
    return np.mean(outputs, axis=0)


MODEL = td.Model(network, states())


def encoded(image: Image.Image, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", **options)
    return buffer.getvalue()


def upload(image: np.ndarray) -> bytes:
    return encoded(Image.fromarray(image))


def featurized(ds: xr.Dataset, model: td.Model = MODEL) -> xr.Dataset:
    return td.featurize(ds, model, projector=PROJECTOR)


def explorer_of_images(preprocess: Callable[[Any], Any] = prepared) -> Explorer:
    train, targets = samples(N, 0), samples(M, 1)
    return td.explore(
        featurized(train).compute(), featurized(targets).compute(), samples=train,
        target_samples=targets, estimator=td.Trak(damping=0.1), model=MODEL, preprocess=preprocess,
    )  # fmt: skip


@pytest.fixture(scope="module")
def explorer() -> Explorer:
    return explorer_of_images()


def expected_top(image: np.ndarray, *, label: int, k: int = 10) -> list[int]:
    """Return the training samples that helped an image most, by the functions of the library."""
    whole = td.from_arrays({"image": prepared(image)[None]}, coords={"label": [label]})
    train = featurized(samples(N, 0)).compute()
    scores = td.score(train, featurized(whole).compute(), td.Trak(damping=0.1))
    return [int(i) for i in np.argsort(-scores.values[:, 0], kind="stable")[:k]]


def test_target__has_the_features_and_scores_of_its_image(explorer: Explorer) -> None:
    image = images(1, 7)[0]
    made, html = explorer.maker.target({"image": upload(image), "label": "2"})
    whole = td.from_arrays({"image": prepared(image)[None]}, coords={"label": [2]})
    alone = featurized(whole).compute()
    for name in ("feature", "output", "out_to_loss"):
        np.testing.assert_array_equal(made[name], alone[name])
    grown = explorer.with_target(made, html)
    assert grown.setting is explorer.setting  # what is known of training samples is kept
    top = grown.top(View(target=M, k=5))
    assert top["sample"].tolist() == expected_top(image, label=2, k=5)
    targets = explorer.targets.features
    assert targets.sizes["sample"] == M  # others do not see it
    of_new = grown.targets.features.isel(sample=M)
    assert (of_new.label.item(), of_new.source.item(), of_new.is_old.item()) == (2, "", False)
    assert np.isnan(of_new.year)
    assert np.isnat(of_new.day)
    for name in ("label", "source", "year", "is_old", "feature"):
        np.testing.assert_array_equal(grown.targets.features[name][:M], targets[name])
    again = grown.with_target(made, html).targets.features
    assert again.new.values.tolist() == [False] * M + [True, True]


def test_target__has_the_class_that_is_predicted_if_none_is_given(explorer: Explorer) -> None:
    for seed in range(5):
        image = images(1, seed)[0]
        probability = probabilities(prepared(image)[None])
        made, _ = explorer.maker.target({"image": upload(image), "label": " "})
        assert made.label.values.tolist() == [int(np.argmax(probability))]


def test_target__of_some_checkpoints_in_another_order() -> None:
    chosen = ["seed 2", "seed 0"]
    features = featurized(samples(N, 0)).sel(checkpoint=chosen)
    explorer = td.explore(features, features, model=MODEL, preprocess=prepared)
    image = images(1, 7)[0]
    made, _ = explorer.maker.target({"image": upload(image), "label": "1"})
    alone = featurized(td.from_arrays({"image": prepared(image)[None]}, coords={"label": [1]}))
    expected = alone.sel(checkpoint=chosen).compute()
    np.testing.assert_array_equal(made.feature, expected.feature)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        weight = attention_mask[..., None].to(self.head.weight.dtype)
        return self.head((self.embedding(input_ids) * weight).sum(1) / weight.sum(1))


def tokens(text: str) -> dict[str, list[int]]:
    ids = [ord(character) % 128 for character in text]
    return {"input_ids": ids, "token_type_ids": [0] * len(ids), "attention_mask": [1] * len(ids)}


def texts(*lines: str) -> xr.Dataset:
    width = max(map(len, lines))
    inputs = [tokens(line) for line in lines]
    arrays = {
        name: np.array([one[name] + [0] * (width - len(one[name])) for one in inputs])
        for name in ("input_ids", "attention_mask")
    }
    return td.from_arrays(arrays, coords={"label": np.arange(len(lines)) % CLASSES})


def test_target__of_a_text_of_another_length() -> None:
    torch.manual_seed(0)
    model = td.Model(Words(), task="text_classification")
    train = texts("one", "three", "seven", "a", "bb")
    features = featurized(train, model)
    explorer = td.explore(features, features, samples=train, model=model, tokenizer=tokens)
    made, html = explorer.maker.target({"text": "quite a long <b>text</b>", "label": "1"})
    alone = texts("", "quite a long <b>text</b>").isel(sample=[1])
    expected = featurized(alone, model).compute()
    np.testing.assert_allclose(made.feature, expected.feature, rtol=1e-5)
    assert "&lt;b&gt;" in html
    for text in ("", "  ", "x" * 100_001):
        with pytest.raises(ValueError, match="a text"):
            explorer.maker.target({"text": text})


PNG = upload(images(1, 0)[0])


@pytest.mark.parametrize(
    ("content", "preprocess", "words"),
    [
        ({}, prepared, "file of an image"),
        ({"image": PNG, "label": "two"}, prepared, "'two'"),
        ({"image": PNG, "label": "7"}, prepared, "The label must be a whole number from 0 to 2."),
        ({"image": PNG, "label": "1.5"}, prepared, "a whole number from 0 to 2"),
        ({"image": PNG, "label": "1,1"}, prepared, "a whole number from 0 to 2"),
        ({"image": PNG, "label": "1e99"}, prepared, "must be a number, not '1e99'"),
        ({"image": PNG, "label": "nan"}, prepared, "must be a number, not 'nan'"),
        ({"image": PNG, "label": "1"}, lambda image: None, "preprocess"),
        ({"image": PNG, "label": "1"}, lambda image: np.array(["a"]), "'image'"),
        ({"image": PNG, "label": "1"}, lambda image: {"picture": np.ones(3)}, "'image'"),
    ],
    ids=[
        *("nothing", "no number", "no such class", "between", "two", "large", "nan", "None"),
        *("no numbers", "another name"),
    ],
)
def test_target__refused(
    explorer: Explorer, content: dict[str, Any], preprocess: Any, words: str
) -> None:
    maker = dataclasses.replace(explorer.maker, preprocess=preprocess)
    with pytest.raises((TypeError, ValueError, td.errors.BlockError), match=words):
        maker.target(content)


def bomb(side: int) -> bytes:
    """Return some kilobytes that become side × side pixels."""
    return encoded(Image.new("1", (side, side)))


def test_decoded_image__has_the_pixels_of_the_file_the_way_up_it_was_taken() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    np.testing.assert_array_equal(decoded_image(encoded(Image.fromarray(pixels))), pixels)
    grey = decoded_image(encoded(Image.fromarray(pixels[..., 0])))
    np.testing.assert_array_equal(grey, np.repeat(pixels[..., :1], 3, axis=2))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by 90 degrees
    turned = decoded_image(encoded(Image.fromarray(pixels), exif=exif))
    np.testing.assert_array_equal(turned, np.rot90(pixels, -1))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read"),
        (b"<svg onload='alert(1)'/>", "cannot be read"),
        (encoded(Image.fromarray(np.zeros((90, 90), np.uint8)))[:60], "cannot be read"),
        (bomb(8_000), "pixels"),
        (bomb(15_000), "pixels"),
        (PNG + bytes(MOST_BYTES), "10 MB"),
    ],
    ids=["empty", "svg", "truncated", "large", "bomb", "large file"],
)
def test_decoded_image__refuses(content: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decoded_image(content)
