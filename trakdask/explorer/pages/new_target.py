"""The form of a new target: a text, an image, and numbers beside them."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from trakdask.explorer.pages.html import note, text_field
from trakdask.explorer.pages.section import Section
from trakdask.explorer.uploads import MOST_BYTES

if TYPE_CHECKING:
    from trakdask.explorer.explorer import Explorer
    from trakdask.explorer.state import View

__all__ = ["sections"]


def sections(explorer: Explorer, view: View) -> list[Section]:
    """Return the form."""
    what = (
        "A text or image of your own. The model says what it makes of it, and its page shows why."
    )
    return [Section("New target", what, lambda: _form(explorer))]


def _form(explorer: Explorer) -> str:
    maker = explorer.maker
    if maker is None:
        return note(
            "The model is not at hand: open the explorer with td.explore(..., model=model, "
            "preprocess=transform) or tokenizer=, or with trakdask explore --model."
        )
    content = ""
    if maker.tokenizer is not None:
        content += '<label class="long">Text<textarea name="text" rows="4"></textarea></label>'
    if maker.preprocess is not None:
        content += '<label>Image<input type="file" name="image" accept="image/*"></label>'
    hint = "as predicted" if maker.finds_class else "a number"
    content += "".join(text_field(n, "", escape(n), hint) for n in maker.numbers)
    return (
        f'<form data-new data-most="{MOST_BYTES}">{content}<button>Explain it</button></form>'
        + note(
            "It is kept in this tab only, until you load the page again; nothing is written. "
            f"Images may have up to {MOST_BYTES // 2**20} MB."
        )
    )
