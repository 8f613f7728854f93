"""Run by every kernel that builds a page: a command after ``!`` that fails is an error.

IPython would only remember its exit code, and the page would show the message as its output.
"""

from __future__ import annotations

import subprocess
from typing import Any

from IPython import get_ipython


def raise_for_exit_codes(shell: Any) -> None:
    """Make ``!`` raise an error for an exit code that is not 0."""
    run = shell.system

    def system(command: str) -> None:
        run(command)
        if code := shell.user_ns["_exit_code"]:
            raise subprocess.CalledProcessError(code, command)

    shell.system = system


raise_for_exit_codes(get_ipython())
