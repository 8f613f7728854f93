"""The command line: jobs that a configuration file describes, run by ``trakdask`` in a shell.

The modules that load Dask and torch are loaded on first use, because a shell that completes a
command waits for this package.
"""

from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from trakdask.command_line import jobs as jobs
    from trakdask.command_line import results as results

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, ["jobs", "results"])
