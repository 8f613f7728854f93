"""Images that somebody uploads: decoded within limits, and shown small."""

from __future__ import annotations

import io
from base64 import b64decode, b64encode
from binascii import Error
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_BYTES = 10 * 2**20
"""The largest size of an uploaded file."""

_MOST_PIXELS = 50_000_000
"""The largest size of an uploaded image, which takes three bytes for each in memory."""

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_SHOWN_PIXELS = 256


def decoded_image(content: str) -> Image:
    """Return an image in RGB, the way up it was taken, from its file in base64.

    The number of pixels is read from the head of the file, before any of them is decoded.

    Raises
    ------
    ValueError
        If the file is larger than 10 MB, or no image, or damaged, or has more than 50 million
        pixels.
    """
    from PIL import Image, ImageOps  # optional dependency, of matplotlib

    if len(content) > MOST_BYTES * 4 / 3 + 4:
        raise too_large(f"{len(content) * 3e-6 / 4:.1f} MB")
    try:
        file = io.BytesIO(b64decode(content, validate=True))
        with Image.open(file, formats=_FORMATS) as image:
            width, height = image.size
            if width * height <= _MOST_PIXELS:
                return ImageOps.exif_transpose(image).convert("RGB")
    except Image.DecompressionBombError as err:
        raise too_large("too many pixels") from err
    except (OSError, SyntaxError, Error, ValueError, EOFError) as err:
        raise ValueError(
            f"This file cannot be read as an image. It may be one of {', '.join(_FORMATS)}."
        ) from err
    raise too_large(f"{width:,} × {height:,} pixels")


def thumbnail(image: Image) -> str:
    """Return an image of at most 256 × 256 pixels as a PNG in a URL."""
    small, buffer = image.copy(), io.BytesIO()
    small.thumbnail((_SHOWN_PIXELS, _SHOWN_PIXELS))
    small.save(buffer, format="png")
    return f"data:image/png;base64,{b64encode(buffer.getvalue()).decode()}"


def too_large(size: str) -> ValueError:
    """Return the error of an image that is too large."""
    return ValueError(
        f"This image is too large: {size}. It may have up to {MOST_BYTES // 2**20} MB and "
        f"{_MOST_PIXELS:,} pixels."
    )
