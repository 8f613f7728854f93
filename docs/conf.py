"""Settings of the documentation, which ``make docs`` builds without a network."""

from __future__ import annotations

import os
from importlib.metadata import version as version_of
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

# Kernels read no settings of whoever builds, and do not warn of local ports at every start.
profile = Path(__file__).parent / "_build" / "ipython" / "profile_default"
profile.mkdir(parents=True, exist_ok=True)
(profile / "ipython_kernel_config.py").write_text("c.IPKernelApp.log_level = 40\n")
os.environ["IPYTHONDIR"] = str(profile.parent)

project = "trakdask"
author = "trakdask contributors"
project_copyright = author
version = release = version_of("trakdask")

extensions = [
    "myst_nb",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_copybutton",
    "sphinx_design",
]
templates_path = ["_templates"]
exclude_patterns = ["_build", "jupyter_execute"]

html_theme = "sphinx_book_theme"
html_title = "trakdask"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_show_copyright = False
html_theme_options = {"show_toc_level": 2, "use_download_button": False}

# Code on the pages runs at every build, so that its output is never out of date.
nb_execution_mode = "auto"
nb_execution_timeout = 180
nb_execution_raise_on_error = True
nb_merge_streams = True
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autosummary_generate = True
autodoc_typehints = "none"  # numpydoc shows the types in words
autodoc_member_order = "bysource"
add_module_names = False
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False

# Every reference must lead somewhere. Other projects' names are shown, but without a network they
# cannot be looked up, and so are not linked.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(torch|nn|np|numpy|xr|xarray|da|dask|distributed|pd|pandas|zarr|collections)\..*"),
]
