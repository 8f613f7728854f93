"""Images that somebody uploads: decoded within limits, or refused with a sentence."""

from __future__ import annotations

import io
from base64 import b64decode, b64encode
from binascii import Error
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["MOST_BYTES", "decoded_image", "thumbnail"]

MOST_BYTES = 10 * 2**20
"""Of an uploaded file."""

_MOST_PIXELS = 50_000_000
"""Of an uploaded image, which takes three bytes for each in memory."""

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_SHOWN_PIXELS = 256


def decoded_image(content: str) -> Image:
    """Return an image in RGB, the way up it was taken, from its file in base64.

    The number of pixels is read from the head of the file, before any of them is decoded.

    Raises
    ------
    ValueError
        If the file is larger than 10 MB, or is no image, a damaged one, or one of more than 50
        million pixels.
    """
    from PIL import Image, ImageOps  # optional dependency, of matplotlib

    if len(content) > MOST_BYTES * 4 / 3 + 4:
        raise ValueError(
            f"expected a file of at most {MOST_BYTES // 2**20} MB, got "
            f"{len(content) * 3e-6 / 4:.1f} MB; try a smaller image"
        )
    try:
        file = io.BytesIO(b64decode(content, validate=True))
        with Image.open(file, formats=_FORMATS) as image:
            width, height = image.size
            if width * height <= _MOST_PIXELS:
                return ImageOps.exif_transpose(image).convert("RGB")
    except Image.DecompressionBombError as err:
        raise _too_large(str(err)) from err
    except (OSError, SyntaxError, Error, ValueError, EOFError) as err:
        raise ValueError(
            f"expected an image ({', '.join(_FORMATS)}), got a file that cannot be read as one "
            f"({type(err).__name__}); try another file"
        ) from err
    raise _too_large(f"{width:,} × {height:,} pixels")


def thumbnail(image: Image) -> str:
    """Return an image of at most 256 × 256 pixels as a PNG in a URL."""
    small, buffer = image.copy(), io.BytesIO()
    small.thumbnail((_SHOWN_PIXELS, _SHOWN_PIXELS))
    small.save(buffer, format="png")
    return f"data:image/png;base64,{b64encode(buffer.getvalue()).decode()}"


def _too_large(size: str) -> ValueError:
    return ValueError(
        f"expected an image of at most {_MOST_PIXELS:,} pixels, got {size}; try a smaller image"
    )
