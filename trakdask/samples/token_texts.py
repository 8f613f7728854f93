"""Texts of tokens, which together are the text that their tokenizer makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import takewhile
from typing import Any

from trakdask.checks import shown

Text = Callable[[int], str] | Sequence[str]

_UNKNOWN = "\ufffd"
"""What decoders write for bytes that are only a part of a character."""

_MOST_PARTS = 16
"""More tokens in a row than this do not share characters, but are no text."""

_PAIRS_KEPT = 2**16


def token_texts(text: Text | Any) -> Callable[[Sequence[int]], list[str]]:
    """Return a function that divides the text of a sequence among its tokens.

    Parameters
    ----------
    text
        A tokenizer, its method ``decode``, a function of a token id, or a list of all texts.

    Returns
    -------
    From the token ids of a sequence to their texts, with the spaces and without the marks that the
    tokenizer puts between words. If a character is made of several tokens, the first has it, and
    the others have no text. A function of one id knows no spaces, nor does a list.

    Raises
    ------
    TypeError
        If the text is neither.

    Examples
    --------
    >>> token_texts(["a", "b"])([1, 0])
    ['b', 'a']
    """
    read: Any = getattr(text, "decode", text)
    if callable(read):
        decode = lru_cache(_PAIRS_KEPT)(lambda ids: read(list(ids)))
        one = lru_cache(_PAIRS_KEPT)(read)
        return lambda ids: _divided(decode, ids) if _is_of_lists(read, ids) else [*map(one, ids)]
    if isinstance(text, str) or not isinstance(text, Sequence):
        raise TypeError(
            f"expected text as a function of a token id, or a list of all texts, got {shown(text)};"
            " try text=tokenizer.decode"
        )
    return partial(_listed, text)


def _listed(texts: Sequence[str], ids: Sequence[int]) -> list[str]:
    if not 0 <= min(ids) <= max(ids) < len(texts):
        raise ValueError(
            f"expected text= with the texts of all token ids, from {min(ids)} up to {max(ids)} "
            f"here, got {len(texts)} texts; try text=tokenizer.decode"
        )
    return [texts[number] for number in ids]


def _is_of_lists(decode: Callable[..., Any], ids: Sequence[int]) -> bool:
    """Return whether a function decodes a list of ids; one of a single id may accept it, too."""
    try:
        alone = decode(ids[0])
    except (AttributeError, TypeError):
        return True
    try:
        among = decode([ids[0]])
    except Exception:
        return False
    return isinstance(among, str) and among == alone


def _divided(decode: Callable[[tuple[int, ...]], str], ids: Sequence[int]) -> list[str]:
    """Return what each token adds to the text of the token before it."""
    # A token is decoded behind the one before it, because decoders treat the beginning of a text in
    # another way: they leave out its first space.
    texts: list[str] = []
    before: tuple[int, ...] = ()
    while len(texts) < len(ids):
        rest = ids[len(texts) : len(texts) + _MOST_PARTS]
        more = [_added(decode, before, rest[:1])]
        # Bytes that begin a character wait for the tokens that complete it.
        while more[-1].endswith(_UNKNOWN) and len(more) < len(rest):
            more.append(_added(decode, before, rest[: len(more) + 1]))
        n, new = (1, more[0]) if _UNKNOWN in more[-1] else (len(more), more[-1])
        texts += [new, *[""] * (n - 1)]
        before = tuple(rest[:n]) if new else before
    return texts


def _added(decode: Callable[..., str], before: tuple[int, ...], ids: Sequence[int]) -> str:
    whole, known = decode((*before, *ids)), decode(before) if before else ""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(known, whole, strict=False))
    return whole[len([*same]) :]
