"""How the gradient of a sample is divided into parts, whose features add up to the sample's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trakdask.checks import shown
from trakdask.models.gradients import number_of_tokens
from trakdask.models.modules import select_parameters
from trakdask.models.products import Products
from trakdask.models.tasks import Batch

__all__ = ["OTHERS", "Partition", "groups_of_parameters"]

OTHERS = "others"
"""Name of the part with the parameters that no given part has."""


@dataclass(frozen=True)
class Partition:
    """The parts of a sample.

    Parameters
    ----------
    dim
        Name of their dimension.
    size
        Their number.
    groups
        Number of the part of each parameter; None if every parameter has a term for every part.
    """

    dim: str
    size: int
    groups: Mapping[str, int] | None = None

    def of(self, batch: Batch) -> Partition:
        """Return the parts of a batch, of which padding may have been cut."""
        return self if self.groups else replace(self, size=number_of_tokens(batch))

    def products(self, vectors: Mapping[str, Tensor], n_samples: int) -> Products:
        """Return what multiplies the gradients of some samples with vectors."""
        if self.groups is None:
            return Products(vectors, n_samples * self.size)
        return Products(vectors, n_samples, self.groups, self.size)

    def spec(self) -> dict[str, Any]:
        """Return a JSON-able value that says what the parts are."""
        return {"dim": self.dim, "groups": None if self.groups is None else dict(self.groups)}


def groups_of_parameters(
    module: torch.nn.Module, names: Sequence[str], parts: Any
) -> tuple[dict[str, int], list[str]]:
    """Return the number of the part of each parameter, and the names of the parts.

    Parameters
    ----------
    module
        The model.
    names
        The selected parameters.
    parts
        A mapping from the name of a part to a name or glob of parameters, or several of these; or a
        list of words, each of which stands for all parameters whose names contain it.

    Raises
    ------
    TypeError, ValueError
        If it is none of these, if a part selects nothing, or if two parts share a parameter.
    """
    groups: dict[str, int] = {}
    titles = _patterns(parts)
    for number, (title, patterns) in enumerate(titles.items()):
        for name in set(select_parameters(module, patterns)) & set(names):
            if name in groups:
                raise ValueError(
                    f"expected each parameter in one part, got {name!r} in {title!r} and in "
                    f"{list(titles)[groups[name]]!r}; try globs that exclude each other"
                )
            groups[name] = number
        if number not in groups.values():
            raise ValueError(
                f"expected parameters of the model in each part, got {title!r}: {patterns}, which "
                f"selects none of those that are differentiated; try globs of {list(names)[:4]}"
            )
    rest = {name: len(titles) for name in names if name not in groups}
    return groups | rest, [*titles, *([OTHERS] if rest else [])]


def _patterns(parts: Any) -> dict[str, list[str]]:
    remedy = "try parts='token', parts=['attn', 'mlp'], or parts={'mlp': '*.mlp.*'}"
    if isinstance(parts, str) or not isinstance(parts, Sequence | Mapping):
        raise ValueError(
            f"expected parts='token', a list or a mapping, got {shown(parts)}; {remedy}"
        )
    named = parts if isinstance(parts, Mapping) else {word: f"*{word}*" for word in parts}
    patterns = {n: [p] if isinstance(p, str) else p for n, p in named.items()}
    words: list[Any] = [
        *patterns,
        *(p for each in patterns.values() if isinstance(each, list) for p in each),
    ]
    if not patterns or not all(isinstance(each, list) and each for each in patterns.values()):
        raise ValueError(f"expected names or globs for each part, got {shown(parts)}; {remedy}")
    if not all(isinstance(word, str) and word for word in words) or OTHERS in patterns:
        raise ValueError(
            f"expected names of parts as text, none of them {OTHERS!r} or empty, got "
            f"{shown(parts)}; {remedy}"
        )
    return patterns
