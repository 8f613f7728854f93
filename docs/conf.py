"""Settings of the documentation, which ``make docs`` builds without a network."""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Kernels draw figures into the pages, which the backend "Agg" that the Makefile sets would not do.
os.environ.pop("MPLBACKEND", None)

# Sphinx reads nothing outside this folder, so the notebooks are copied into it.
shutil.copytree(
    Path(__file__).parents[1] / "notebooks",
    Path(__file__).parent / "notebooks",
    ignore=shutil.ignore_patterns("*.zarr", "__pycache__", ".ipynb_checkpoints"),
    dirs_exist_ok=True,
)

# Kernels read no settings of whoever builds, and do not warn of local ports at every start. A
# command that fails stops the build; commands are those of this environment.
profile = Path(__file__).parent / "_build" / "ipython" / "profile_default"
(profile / "startup").mkdir(parents=True, exist_ok=True)
(profile / "ipython_kernel_config.py").write_text("c.IPKernelApp.log_level = 40\n")
shutil.copy(Path(__file__).parent / "exit_codes.py", profile / "startup")
os.environ["IPYTHONDIR"] = str(profile.parent)
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

project = "trakdask"
author = "trakdask contributors"
project_copyright = author
version = release = version_of("trakdask")

extensions = [
    "matplotlib.sphinxext.plot_directive",
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
templates_path = ["_templates"]
# Of examples, the button copies the code alone.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
exclude_patterns = ["_build", "jupyter_execute"]

html_theme = "sphinx_book_theme"
html_title = f"trakdask {version}"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["custom.css"]
html_js_files = ["labels.js"]
html_show_copyright = False
html_theme_options: dict[str, Any] = {"show_toc_level": 2, "use_download_button": False}

# Once pyproject.toml names the repository, the pages name it, too, and notebooks open in Colab.
pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))
if repository := pyproject["project"]["urls"].get("Repository"):
    html_theme_options |= {
        "repository_url": repository,
        "repository_branch": "main",
        "use_repository_button": True,
        "launch_buttons": {"colab_url": "https://colab.research.google.com"},
    }

# Code on the pages runs at every build, so that its output is never out of date.
nb_execution_mode = "auto"
nb_execution_timeout = 1800
nb_execution_raise_on_error = True
nb_merge_streams = True
# Notebooks are shown with the outputs that they were committed with; `make notebooks` runs them.
nb_execution_excludepatterns = ["notebooks/*"]
# No formulas of TeX, so that pages load nothing from elsewhere.
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autosummary_generate = True
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
add_module_names = False
napoleon_google_docstring = False
napoleon_attr_annotations = False
# Our docstrings say in prose what a function returns; by default the first line would be its type.
napoleon_custom_sections = ["Returns", "Yields"]

# Examples of td.plots are drawn; the page has the picture and the code, without links to files.
plot_html_show_formats = plot_html_show_source_link = False
plot_formats = [("png", 144)]

# Every reference must lead somewhere. Other projects' names are shown, but without a network they
# cannot be looked up, and so are not linked.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(torch|nn|np|numpy|xr|xarray|da|dask|distributed|pd|pandas|zarr|collections)\..*"),
    ("py:.*", r"(os|pathlib)\..*|Axes|Figure|NDArray|Tensor|EstimatorLike"),
    # Types of parameters and fields that have no page of their own.
    ("py:.*", r"trakdask\.(attribution|explorer|models|plots|projection)\.[a-z_]+\.[A-Za-z_]+"),
]


def setup(app: Any) -> None:
    """Connect the functions below; the last one, before napoleon reads the sections."""
    app.connect("source-read", correct_links)
    app.connect("doctree-read", index_keywords)
    app.connect("autodoc-process-docstring", show_examples_first, priority=400)


def correct_links(app: Any, page: str, source: list[str]) -> None:
    """Correct links to and from notebooks, which are a folder higher in the repository."""
    source[0] = source[0].replace("<the repository>", repository or "<the repository>")
    if page == "index":
        source[0] = source[0].replace("](../notebooks/", "](notebooks/")
    source[0] = source[0].replace("](../../notebooks/", "](../notebooks/")
    source[0] = source[0].replace("](../docs/", "](../")


def index_keywords(app: Any, page: nodes.document) -> None:
    """Put the keywords of a page into the index, which the search asks first."""
    for meta in list(page.findall(nodes.meta)):  # the loop changes the page
        if meta.get("name") == "keywords":
            words = [word.strip() for word in meta["content"].split(",")]
            entries = [("single", word, "", "main", None) for word in words]
            page.insert(0, addnodes.index(entries=entries))


def show_examples_first(
    app: Any, kind: str, name: str, member: Any, options: Any, lines: list[str]
) -> None:
    """Move the examples of a docstring, its last section, before the parameters."""
    if {"Parameters", "Examples"} <= set(lines):
        parameters, examples = lines.index("Parameters"), lines.index("Examples")
        moved = [*lines[:parameters], *lines[examples:], "", *lines[parameters:examples]]
        lines[:] = moved
