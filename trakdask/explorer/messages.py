"""Errors as sentences for a page."""

from __future__ import annotations

from distributed import KilledWorker

from trakdask.errors import BlockError

__all__ = ["plain_message"]

_MOST_CHARACTERS = 400


def plain_message(err: BaseException) -> str:
    """Return what went wrong as a text for people, without a traceback.

    Examples
    --------
    >>> plain_message(FileNotFoundError("train.zarr/c/0"))
    'The store could not be read (train.zarr/c/0). Is it still there?'
    """
    text = " ".join(str(err).split())
    text = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"
    if isinstance(err, KilledWorker):
        return (
            "A worker process ended while it computed this. Try again; if it happens again, the "
            "workers may need more memory."
        )
    if isinstance(err, OSError):
        return f"The store could not be read ({text}). Is it still there?"
    if isinstance(err, MemoryError):
        return "There was not enough memory for this."
    if isinstance(err, (ValueError, TypeError, BlockError)):
        return text[:1].upper() + text[1:]
    return f"This could not be computed ({type(err).__name__}: {text})."
