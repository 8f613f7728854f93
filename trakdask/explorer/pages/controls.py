"""What pages have in common: forms of settings and filters, and cards of samples."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any, get_args

import pandas as pd

from trakdask.attribution.estimators import Estimator, Rule
from trakdask.explorer.filters import SIGNS
from trakdask.explorer.pages.html import form, link, option_field, text_field, tip, value
from trakdask.explorer.pages.words import MEANINGS
from trakdask.explorer.state import View

if TYPE_CHECKING:
    from trakdask.explorer.explorer import Explorer

__all__ = ["filter_form", "mark_buttons", "settings_form", "word"]

_RULES = (*get_args(Rule), "0.03", "absolute 1")


def word(name: str, text: str = "") -> str:
    """Return a word of the field, or a text in its place, with its meaning as a tooltip."""
    return tip(text or name, MEANINGS[name])


def settings_form(explorer: Explorer, view: View) -> str:
    """Return the form of how scores are made: estimator, λ, checkpoints, number of samples."""
    estimators = {"": f"as opened ({explorer.estimator})", **{n: n for n in get_args(Estimator)}}
    if explorer.learning_rates is None:
        del estimators["tracin"]
    content = option_field("estimator", view.estimator, word("estimator", "Estimator"), estimators)
    content += text_field("damping", view.damping, word("λ", "Damping λ"), "as opened", _RULES)
    content += text_field("k", str(view.k), "Samples shown")
    names = explorer.questions.checkpoints
    if len(names) > 1:
        content += _checkpoints(view, names)
    return form(view, content, ["estimator", "damping", "k", "checkpoints"], button="Apply")


def _checkpoints(view: View, names: list[str]) -> str:
    boxes = "".join(
        f'<label class="box"><input type="checkbox" name="checkpoints" value="{escape(name)}"'
        f"{' checked' if not view.checkpoints or name in view.checkpoints else ''}>"
        f"{escape(name)}</label>"
        for name in names
    )
    return f"<fieldset><legend>{word('checkpoints', 'Checkpoints')}</legend>{boxes}</fieldset>"


def filter_form(view: View, table: pd.DataFrame, field: str) -> str:
    """Return the forms of a condition on samples or targets: as text, and put together."""
    where = getattr(view, field)
    text = text_field(field, where, word("condition", "Condition"), "every one")
    forms = form(view, text, [field], kind="where", button="Filter")
    if where:
        forms += link(view.replace(**{field: "", "first": 0}), "Clear the condition", kind="clear")
    names = {str(name): str(name) for name in table if str(name).isidentifier()}
    if not names:
        return forms
    inputs = option_field("filter_name", "", "Add a condition", names, at_once=False)
    inputs += option_field("filter_sign", "", "Comparison", SIGNS, at_once=False)
    inputs += text_field("filter_value", "", "Value", "value")
    inputs += f'<input type="hidden" name="filter_of" value="{field}">'
    return forms + form(view, inputs, [], kind="where", button="Add")


def mark_buttons(explorer: Explorer, position: int) -> str:
    """Return the buttons that mark a training sample, if marks are kept."""
    if explorer.marks is None:
        return ""
    kinds = ("wrong label", "duplicate", "remove")
    buttons = "".join(
        f'<button type="button" data-mark="{kind}" data-sample="{position}" '
        f'aria-label="Mark sample {position} as {kind}">{kind}</button>'
        for kind in kinds
    )
    return f'<div class="marks">{buttons}</div>'


def facts(row: pd.Series, view: View | None = None) -> str:
    """Return metadata as a list of terms; with a view, values are links that filter by them."""
    made = []
    for name, x in row.items():
        shown = value(x)
        if view is not None and str(name).isidentifier():
            shown = _filter_link(view, str(name), x) or shown
        made.append(f"<div><dt>{escape(str(name))}</dt><dd>{shown}</dd></div>")
    return f"<dl>{''.join(made)}</dl>"


def _filter_link(view: View, name: str, x: Any) -> str:
    condition = equals(name, x)
    if condition is None:
        return ""
    label = f"Only training samples with {condition}"
    return link(view.replace(where=condition, first=0), "", html=value(x), label=label)


def equals(name: str, x: Any) -> str | None:
    """Return the condition that a coord has a value; None for values without one."""
    x = getattr(x, "item", lambda: x)()
    if not isinstance(x, (bool, int, float, str)) or x != x:
        return None
    return f"{name} == {x!r}"
