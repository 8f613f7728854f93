"""The command line: jobs that a configuration file describes, run by ``trakdask`` in a shell.

What loads Dask and torch is loaded on first use: a shell that completes a command waits for it.
"""

from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from trakdask.command_line import copies as copies
    from trakdask.command_line import jobs as jobs
    from trakdask.command_line import tables as tables

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, ["copies", "jobs", "tables"])
