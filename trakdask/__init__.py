"""Which training samples made my model do that? Training data attribution by TRAK.

Call Model, attribute and top_k; or featurize, save and score, each by itself. All pages: docs/.
"""

# Importing this loads xarray, to register the accessor ``.trak``. Public names load on first use;
# names that need torch take a second. ``__init__.pyi`` lists them by module.

import lazy_loader

from trakdask._version import __version__ as __version__

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

import trakdask.accessor  # noqa: E402, F401
