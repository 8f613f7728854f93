"""A budget for public names: a new one has to take the place of another. Run it to print them."""

from __future__ import annotations

import importlib
from types import ModuleType

BUDGET = 112

MODULES = (
    *("trakdask", "trakdask.fits", "trakdask.models.tasks", "trakdask.evaluate", "trakdask.plots"),
    *("trakdask.explorer", "trakdask.examples", "trakdask.testing", "trakdask.errors"),
    "trakdask.trak",
)


def public_names() -> dict[str, list[str]]:
    """Return the functions and classes that each public module lists, each of them once."""
    found: dict[str, list[str]] = {path: [] for path in MODULES}
    seen: list[object] = []
    for path in MODULES:
        module = importlib.import_module(path)
        for name in module.__all__:
            value = getattr(module, name)
            if not isinstance(value, ModuleType | str) and value not in seen:
                found[path].append(name)
                seen.append(value)
    return found


def test_public_names__stay_in_their_budget() -> None:
    names = public_names()
    assert sum(map(len, names.values())) <= BUDGET, names


if __name__ == "__main__":
    for path, names in public_names().items():
        print(f"{path:24} {len(names):3}  {' '.join(names)}")
    print(f"{'together':24} {sum(map(len, public_names().values())):3}")
