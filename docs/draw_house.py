"""Draw the import layers of pyproject.toml as a house: ``python docs/draw_house.py``."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
WIDTH, LEFT, INNER, ROW = 780, 130, 600, 34

# The floor that begins with a layer: what is written beside it, its fill and its stroke.
FLOORS = {
    "fits": ("features", "#e8f4ea", "#1a7f37"),
    "attribution": ("questions", "#e7f0fb", "#1565c0"),
    "export": ("data", "#e0f5f5", "#00796b"),
    "provenance": ("labels", "#fdf3dc", "#b7791f"),
    "arrays": ("arithmetic", "#fbe9e7", "#c62828"),
    "execution": ("ground", "#eeeeee", "#666666"),
}
ROOF = ("front doors", "#f3e8fb", "#7b3fb5")


def layers() -> list[list[str]]:
    """Return the layers, from the top, each as its modules."""
    settings = tomllib.loads((HERE.parent / "pyproject.toml").read_text("utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (found,) = (each["layers"] for each in contracts if each["id"] == "layers")
    return [re.findall(r"\w+", layer) for layer in found]


def drawing() -> str:
    """Return the house as SVG."""
    rows, y = list(_rows()), 0
    y = max(bottom for bottom, _ in rows)
    right = LEFT + INNER + 30
    walls = f"M{LEFT} 66 V{y + 8} H{right} V66"
    roof = f"M{LEFT} 66 L{(LEFT + right) / 2:.0f} 8 L{right} 66"
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 24}" width="{WIDTH}" '
        f'height="{y + 24}" font-family="Helvetica, Arial, sans-serif" role="img">',
        f'<rect width="{WIDTH}" height="{y + 24}" rx="10" fill="#fff"/>',
        f'<path d="{roof}" fill="#f7f2ea" stroke="#8d6e63" stroke-width="2"/>',
        f'<path d="{walls}" fill="none" stroke="#8d6e63" stroke-width="2"/>',
        *(element for _, element in rows),
        "</svg>\n",
    ])  # fmt: skip


def _rows() -> Iterator[tuple[int, str]]:
    (name, fill, stroke), y, is_new = ROOF, 72, True
    for layer in layers():
        if layer[0] in FLOORS:
            (name, fill, stroke), y, is_new = FLOORS[layer[0]], y + 8, True
        if is_new:
            yield y, _text(LEFT - 10, y + 19, name, stroke, "end")
        width = (INNER - 8 * (len(layer) - 1)) / len(layer)
        size = 14 if width > 100 else 10  # so that the longest name fits
        for i, module in enumerate(layer):
            x = LEFT + 15 + i * (width + 8)
            yield (
                y + ROW,
                (
                    f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{ROW - 6}" rx="5" '
                    f'fill="{fill}" stroke="{stroke}"/>'
                    + _text(x + width / 2, y + 19, module, size=size)
                ),
            )
        y, is_new = y + ROW, False


def _text(
    x: float, y: float, text: str, fill: str = "#222", anchor: str = "middle", size: int = 14
) -> str:
    return (
        f'<text x="{x:.0f}" y="{y}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">'
        f"{text}</text>"
    )


if __name__ == "__main__":
    (HERE / "_static" / "house.svg").write_text(drawing(), "utf-8")
