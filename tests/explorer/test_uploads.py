"""Uploaded images: decoded as they are, or refused within limits."""

from __future__ import annotations

import io
import struct
import zlib
from base64 import b64decode, b64encode

import numpy as np
import pytest
from PIL import Image

from trakdask.explorer.uploads import MOST_BYTES, decoded_image, thumbnail


def encoded(image: Image.Image, form: str = "PNG", **options: object) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format=form, **options)
    return b64encode(buffer.getvalue()).decode()


def bomb(side: int) -> str:
    """Return a PNG of some hundred bytes whose head promises side × side pixels."""
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(bytes(64))), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
    return b64encode(b"\x89PNG\r\n\x1a\n" + body).decode()


def test_decoded_image__has_the_pixels_of_the_file() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    np.testing.assert_array_equal(decoded_image(encoded(Image.fromarray(pixels))), pixels)
    grey = decoded_image(encoded(Image.fromarray(pixels[..., 0])))
    np.testing.assert_array_equal(grey, np.repeat(pixels[..., :1], 3, axis=2))


def test_decoded_image__is_the_way_up_it_was_taken() -> None:
    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[:, 8:] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by 90 degrees
    turned = decoded_image(encoded(Image.fromarray(pixels), exif=exif))
    np.testing.assert_array_equal(turned, np.rot90(pixels, -1))


def test_thumbnail__is_small() -> None:
    url = thumbnail(Image.fromarray(np.zeros((600, 300, 3), np.uint8)))
    content = b64decode(url.removeprefix("data:image/png;base64,"))
    assert Image.open(io.BytesIO(content)).size == (128, 256)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "cannot be read"),
        ("no base64 at all!", "cannot be read"),
        (b64encode(b"<svg onload='alert(1)'/>").decode(), "cannot be read"),
        (encoded(Image.fromarray(np.zeros((90, 90), np.uint8)))[:80], "cannot be read"),
        (bomb(8_000), "pixels"),
        (bomb(20_000), "pixels"),
        ("A" * (2 * MOST_BYTES), "10 MB"),
    ],
    ids=["empty", "text", "svg", "truncated", "large", "bomb", "large file"],
)
def test_decoded_image__refuses(content: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decoded_image(content)
