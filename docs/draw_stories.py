"""Draw the pictures of the stories from the outputs of executed notebooks and pages.

    make demo docs && .venv/bin/python docs/draw_stories.py

The picture at the top of the README is drawn by the lines of the README, and the one of suspicious
digits by ``make demo``.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
import tempfile
from html import unescape
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

from trakdask.plots import texts
from trakdask.plots.texts import TextPlot

HERE = Path(__file__).parent
NOTEBOOKS, EXECUTED = HERE.parent / "notebooks", HERE / "_build" / "jupyter_execute"
DEMO = HERE.parent / "demo-output"
CARD = (480, 200)

CROPS = {
    "story_backdoor": ("backdoor", "some of the poisoned", (4, 22, 376, 131)),
    "story_labels": ("wrong_labels", "the most suspicious digits", (404, 23, 809, 231)),
}
"""Name of the picture: its notebook, a text in the cell that draws it, and the part to show."""


def output(notebook: Path, text: str, kind: str) -> str:
    """Return what the one cell with this text has put out, as data of a MIME type."""
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    (found,) = (
        data["data"][kind]
        for cell in cells
        if cell["cell_type"] == "code" and text in "".join(cell["source"])
        for data in cell["outputs"]
        if kind in data.get("data", {})
    )
    return "".join(found)


def write(name: str, image: Image.Image) -> None:
    """Write a picture of few colours; a larger one is made smaller, as large as a card."""
    path = HERE / "_static" / f"{name}.png"
    image.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.name}: {image.width} × {image.height}, {path.stat().st_size / 1000:.0f} kB")


def card(image: Image.Image) -> Image.Image:
    """Put an image into the middle of a white card."""
    scale = min(size / length for size, length in zip(CARD, image.size, strict=True))
    image = image.resize([round(length * scale) for length in image.size], Image.Resampling.LANCZOS)
    whole = Image.new("RGB", CARD, "white")
    whole.paste(
        image, [(size - length) // 2 for size, length in zip(CARD, image.size, strict=True)]
    )
    return whole


def fridays() -> Image.Image:
    """Draw the sums over reviews with and without Friday, which the page on texts prints."""
    printed = output(EXECUTED / "how_to" / "text.ipynb", 'by="friday"', "text/plain")
    sums = dict(line.split() for line in printed.splitlines()[2:])
    figure, ax = plt.subplots(figsize=(4.8, 2), dpi=100, layout="constrained")
    values = [float(sums[name]) for name in ("True", "False")]
    ax.barh(["Friday", "no Friday"], values, color=["#1a7f37", "0.7"], height=0.6)
    ax.invert_yaxis()
    ax.set_title("“we saw the play with ben on friday” → bad,\nby reviews that mention …")
    ax.tick_params(labelsize=12, length=0, labelbottom=False)
    ax.spines[["top", "right", "bottom"]].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer)
    return Image.open(buffer)


def words() -> Image.Image:
    """Draw the first document that the notebook on a language model colours, in shorter lines."""
    html = output(NOTEBOOKS / "language_model.ipynb", "td.plots.text(by_word, label=", "text/html")
    title, row = re.findall(r"<b>(.*?)</b>.*?<div[^>]*>(.*?)</div>", html)[0]
    spans = re.findall(r'title="([^"]*)"[^>]*>([^<]*)</span>', row)
    scores, tokens = np.array([spans]).T
    texts._COLUMNS = 34
    plot = TextPlot(
        [title.ljust(texts._COLUMNS)],  # with its own sum; the new one does not fit
        np.vectorize(unescape)(tokens.T),
        scores.T.astype(float),
        np.ones(scores.T.shape, bool),
        0,
    )
    buffer = io.BytesIO()
    plot.figure().savefig(buffer, dpi=150)
    return Image.open(buffer)


def misread() -> Image.Image:
    """Run the lines of the README that draw its first picture."""
    readme = (HERE.parent / "README.md").read_text("utf-8")
    (lines,) = re.findall(r"```python\n([^`]*gallery\.png[^`]*)```", readme)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        exec(lines.replace('"gallery.png"', '"gallery.png", dpi=160'), {})
        return Image.open(io.BytesIO(Path("gallery.png").read_bytes()))


def main() -> None:
    """Draw one picture after the other."""
    for name, (notebook, text, part) in CROPS.items():
        png = base64.b64decode(output(NOTEBOOKS / f"{notebook}.ipynb", text, "image/png"))
        write(name, card(Image.open(io.BytesIO(png)).crop(part)))
    write("story_friday", fridays())
    write("story_language", card(words()))
    write("gallery", misread())
    write("suspicious", Image.open(DEMO / "suspicious.png"))


if __name__ == "__main__":
    main()
