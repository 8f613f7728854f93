"""Values as tables in notebooks."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from html import escape
from typing import Any


def html_table(title: str, rows: Mapping[str, object]) -> str:
    """Return a title and rows of a name and a value as HTML, in which all text is escaped.

    The table takes the colours of the page. Its class tells dark pages that they need not change
    them.

    Examples
    --------
    >>> "<b>a &lt; b</b>" in html_table("a < b", {"seed": 0})
    True
    """
    body = "".join(
        f"<tr><th>{escape(name)}</th><td><code>{escape(str(value))}</code></td></tr>"
        for name, value in rows.items()
    )
    table = f"<p><b>{escape(title)}</b></p><table><tbody>{body}</tbody></table>"
    frame = "border: 1px solid #8884; border-radius: 4px; padding: 0 1em; display: inline-block"
    return f'<div class="trakdask-html" style="{frame}">{table}</div>'


class HtmlTable:
    """Shows a dataclass in notebooks: its class, and its fields."""

    def _repr_html_(self: Any) -> str:
        kind, values, optional = type(self), dict(vars(self)), set[str]()
        if dataclasses.is_dataclass(self):  # and no subclass of a user
            fields = [field for field in dataclasses.fields(self) if field.repr]
            values = {field.name: getattr(self, field.name) for field in fields}
            optional = {field.name for field in fields if field.kw_only}
        # An option at None asks for nothing.
        shown = {n: repr(x) for n, x in values.items() if x is not None or n not in optional}
        what = (inspect.getdoc(kind) or "").partition("\n")[0]
        return html_table(f"{kind.__name__}: {what}" if what else kind.__name__, shown)
