"""The JSON files of a run, and the settings that all runs of a folder must share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trakdask.files import replacing

EXTRA = "trakdask"
"""Key of ``metadata.json`` that contains everything that the original does not write."""


def read_json(path: Path) -> Any:
    """Return the content of a JSON file."""
    return json.loads(path.read_bytes())


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file as a whole or not at all."""
    with replacing(path, partial=f"{path}.partial", durable=True) as partial:
        partial.write_text(json.dumps(content))


def require_same(before: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Reject settings that contradict the settings of the run that began in a folder.

    The error is an AssertionError, as in the original.
    """
    if EXTRA in now and EXTRA not in before:
        raise AssertionError(
            f"expected a folder of trakdask.trak, got {str(folder)!r}, which the original wrote; "
            "try another save_dir, or open_traker to read its features"
        )
    old, new = ({**metadata, **metadata.get(EXTRA, {})} for metadata in (before, now))
    for key in set(old) & set(new) - {EXTRA, "version"}:
        if old[key] != new[key]:
            raise AssertionError(
                f"expected {key} {old[key]!r}, which the run in {str(folder)!r} was started with, "
                f"got {new[key]!r}; try the same setting, or another save_dir"
            )
