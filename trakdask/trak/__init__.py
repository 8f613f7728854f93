"""The interface of the TRAK package (``traker`` 0.3.2) on this engine.

Replace ``trak`` with ``trakdask.trak`` in the imports of a script; nothing else changes. The
modules have the original's names: ``traker``, ``gradient_computers``, ``modelout_functions``,
``projectors``, ``savers``, ``score_computers`` and ``utils``. The files of a run have the format of
the original's, and :func:`trakdask.trak.open_traker` opens both.
"""

from trakdask.trak.opening import open_traker
from trakdask.trak.traker import TRAKer
from trakdask.trak.utils import test_install

__all__ = ["VERSION", "TRAKer", "__version__", "open_traker", "test_install"]

__version__ = "0.3.2"
"""The version of the ``traker`` package whose interface this is."""

VERSION = __version__
