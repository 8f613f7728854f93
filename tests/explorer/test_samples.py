"""Contents as HTML: they are shown, and never run."""

from __future__ import annotations

import io
from base64 import b64decode
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import xarray as xr

import trakdask as td
from trakdask.explorer.contents import Contents

SCRIPT = "<script>alert('you')</script>&\"'"
ESCAPED = "&lt;script&gt;alert(&#x27;you&#x27;)&lt;/script&gt;&amp;&quot;&#x27;"


def pixels(html: str) -> np.ndarray:
    encoded = html.partition("base64,")[2].partition('"')[0]
    return np.asarray(matplotlib.image.imread(io.BytesIO(b64decode(encoded)), format="png"))


GREY, COLOURED = np.random.default_rng(0).random((2, 9, 6, 5, 3), np.float32)
RANGE = GREY[4, ..., 0].min(), np.ptp(GREY[4, ..., 0])
FIRST, NORMAL = np.moveaxis(COLOURED, 3, 1), ((0.5,) * 3, (0.25,) * 3)


@pytest.mark.parametrize(
    ("image", "normalize", "expected"),
    [
        *((GREY[..., :1].reshape(9, *shape), None, (GREY[4, ..., :1] - RANGE[0]) / RANGE[1])
          for shape in ((6, 5), (1, 6, 5), (6, 5, 1))),
        (COLOURED, None, COLOURED[4]), (FIRST, None, COLOURED[4]),
        ((FIRST - 0.5) / 0.25, NORMAL, COLOURED[4]),
    ],
    ids=["grey", "a channel", "a channel last", "channels last", "channels", "normalized"],
)  # fmt: skip
def test_html__of_images(image: np.ndarray, normalize: Any, expected: np.ndarray) -> None:
    samples = Contents(td.from_arrays({"image": image}), normalize=normalize, cmap="gray")
    _, html = samples.html([2, 4])
    np.testing.assert_allclose(pixels(html)[..., : expected.shape[2]], expected, atol=2 / 255)


def test_html__escapes_texts_tokens_and_names() -> None:
    ids, words = np.array([[0, 1, 2]]), np.array([f"plain {SCRIPT}"], object)
    samples = xr.Dataset(
        {"ids": (("sample", "token"), ids), "words": ("sample", words), SCRIPT: ("sample", [2.5])}
    )
    (html,) = Contents(samples, text=["a", SCRIPT, "b"].__getitem__).html([0])
    assert f"a{ESCAPED}b" in html
    assert f"plain {ESCAPED}" in html
    assert f"{ESCAPED}: 2.5" in html
    assert "<script" not in html


IDS = np.array([[3, 1, 0, 0], [2, 2, 1, 0]])
MASK = (IDS > 0).astype(int)
LETTERS = ["-", "a", "b", "c"]


@pytest.mark.parametrize(
    ("variables", "inputs", "texts"),
    [
        ({"input_ids": IDS, "attention_mask": MASK}, (), {"input_ids": "ca--"}),
        ({"ids": IDS, "seen": MASK}, (), {"ids": "ca--"}),
        ({"ids": IDS, "span_mask": IDS, "labels": IDS, "token_type_ids": IDS}, (), {"ids": "ca--"}),
        ({"input_ids": MASK, "lengths": IDS}, (), {"input_ids": "aa--"}),
        ({"chosen_input_ids": IDS, "rejected_input_ids": IDS[::-1], "goal": IDS}, (),
         {"chosen_input_ids": "ca--", "rejected_input_ids": "bba-"}),
        ({"counts": IDS, "words": IDS[::-1]}, ("words", "counts"), {"words": "bba-"}),
        ({"padding": MASK, "ids": IDS}, ("padding", "ids"), {"ids": "ca--"}),
        ({"segments": IDS, "length": IDS, "words": IDS}, (), {"words": "ca--"}),
        ({"ids": IDS - 100, "labels": IDS}, (), {}),
        ({"ids": IDS + 4}, (), {}),
    ],
)  # fmt: skip
def test_html__texts_are_the_token_ids_and_nothing_else(
    variables: dict[str, np.ndarray], inputs: tuple[str, ...], texts: dict[str, str]
) -> None:
    samples = td.from_arrays(variables)
    (html,) = Contents(samples, LETTERS, inputs).html([0])
    expected = [
        f'<p class="text">{texts[name]}</p>' if name in texts
        else f'<p class="numbers">{name}: {", ".join(map(str, values[0]))}</p>'
        for name, values in variables.items() if "mask" not in name  # which is no content
    ]  # fmt: skip
    assert html == "".join(expected)


def test_html__of_numbers_is_short_and_in_brief_of_the_image_alone() -> None:
    image, x = np.zeros((3, 8, 8), np.float32), np.arange(300.0).reshape(3, 100)
    contents = Contents(td.from_arrays({"x": x, "image": image}))
    (html,) = contents.html([1])
    assert "x: 100, 101" in html
    assert "100 numbers" in html
    (brief,) = contents.html([1], brief=True)
    assert brief.startswith("<img")
    assert "x:" not in brief
    assert Contents().html([1, 2]) == ["", ""]


def test_html__reads_only_what_is_shown() -> None:
    samples = td.from_arrays({"image": np.zeros((8, 4, 4))}, chunks=1)

    def fail(block: np.ndarray) -> np.ndarray:
        raise AssertionError("read a sample that is not shown")

    later = samples.image.data[4:].map_blocks(fail, dtype=float, meta=np.zeros((0, 4, 4)))
    broken = xr.concat([samples.isel(sample=slice(4)), samples.isel(sample=slice(4, 8)).assign(
        image=(samples.image.dims, later)
    )], "sample")  # fmt: skip
    assert len(Contents(broken).html([1, 3])) == 2
    with pytest.raises(AssertionError):
        Contents(broken).html([5])
