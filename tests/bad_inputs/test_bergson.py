"""Bad inputs of open_bergson: stores that are not what they should be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bad_inputs.bad_input import BadInput, check, parametrize
from trakdask.bergson import open_bergson


def store(folder: Path, name: str = "store", **changes: Any) -> Path:
    """Write a store of 3 samples and two modules, with some entries of info.json changed."""
    path = folder / name
    path.mkdir()
    info = {"attribute_tokens": False, "num_items": 3, "num_grads": 3, "base_dtype": "float32"}
    info |= {"grad_sizes": {"q": 4, "mlp": 3}} | changes
    info = {key: value for key, value in info.items() if value is not None}
    (path / "info.json").write_text(json.dumps(info))
    np.zeros((3, 7), np.float32).tofile(path / "gradients.bin")
    return path


def opened(name: str = "store", **changes: Any) -> Callable[[Path], object]:
    return lambda folder: open_bergson(store(folder, name, **changes))


def of_other_samples(folder: Path) -> object:
    other = store(folder, "other", num_grads=2)
    np.zeros((2, 7), np.float32).tofile(other / "gradients.bin")
    return open_bergson([store(folder), other])


def of_other_modules(folder: Path) -> object:
    return open_bergson([store(folder), store(folder, "other", grad_sizes={"k": 7})])


ROWS = [
    BadInput("open_bergson", "no stores", lambda f: open_bergson([]), ValueError, ["got none"]),
    BadInput("open_bergson", "no store there", lambda f: open_bergson(f / "nowhere"), FileNotFoundError, ["nowhere", "info.json"]),
    BadInput("open_bergson", "the folder above", lambda f: (store(f, "shard"), open_bergson(f)), FileNotFoundError, ["info.json", "['shard']"]),
    BadInput("open_bergson", "not finished", opened("run.part"), ValueError, ["run.part"]),
    BadInput("open_bergson", "other samples", of_other_samples, ValueError, ["(2,", "'1'"]),
    BadInput("open_bergson", "other modules", of_other_modules, ValueError, ["'1'", "'k'"]),
]  # fmt: skip


@parametrize(ROWS)
def test_open_bergson__bad_inputs(row: BadInput, tmp_path: Path) -> None:
    check(row, tmp_path)


def test_store__opens_as_it_is(tmp_path: Path) -> None:
    """The rows fail by their change and nothing else."""
    assert open_bergson(store(tmp_path)).sizes == {"sample": 3, "proj_dim": 7, "checkpoint": 1}
    with pytest.raises(FileNotFoundError):
        open_bergson(tmp_path)
