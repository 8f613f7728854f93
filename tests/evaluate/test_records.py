"""Records of models: whole or absent, known by what they are of."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import trakdask as td
from trakdask.evaluate.records import model_key, open_records

SPEC = {"tag": "mlp", "samples": 4, "targets": 2}


def test_model_key__of_mask_and_seed() -> None:
    keys = {
        model_key(np.array(mask, bool), seed)
        for mask in ([1, 0], [0, 1], [1, 0, 0], [1] * 8 + [0], [1] * 8)
        for seed in (0, 1)
    }
    assert len(keys) == 10
    assert all(len(key) == 32 and key.isalnum() for key in keys)


def test_records__what_is_written_is_read(tmp_path: Path) -> None:
    records = open_records(tmp_path / "s", SPEC)
    assert records.done() == set()
    assert records.read("a", 2) is None
    records.write("a", np.array([1.5, np.inf]))
    np.testing.assert_array_equal(records.read("a", 2), [1.5, np.inf])
    again = open_records(tmp_path / "s", SPEC)
    assert again == records
    assert again.done() == {"a"}


def test_records__killed_while_writing_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All bytes are there but for the last step: no record."""
    records = open_records(tmp_path / "s", SPEC)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(os, "replace", killed)
        context.setattr(os, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            records.write("a", np.zeros(2))
    assert len(list((tmp_path / "s" / "models").iterdir())) == 1
    assert records.done() == set()
    assert records.read("a", 2) is None


def test_open_records__killed_while_the_store_was_made(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / f"spec.json.{32 * '0'}.partial").write_text("{")
    assert open_records(tmp_path / "s", SPEC).done() == set()


@pytest.mark.parametrize("field", SPEC)
def test_open_records__other_spec(tmp_path: Path, field: str) -> None:
    open_records(tmp_path / "s", SPEC)
    with pytest.raises(td.StoreMismatchError, match=f"differ in {field}: expected .*, got 'x'"):
        open_records(tmp_path / "s", {**SPEC, field: "x"})


def test_open_records__something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"got .*something else"):
        open_records(tmp_path, SPEC)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("content", [b"", b"not numpy", b"\x93NUMPY\x01"])
def test_records__damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    records = open_records(tmp_path / "s", SPEC)
    records.write("a", np.zeros(2))
    (tmp_path / "s" / "models" / "a.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.npy', got a damaged file"):
        records.read("a", 2)


def test_records__outputs_of_another_number_of_targets(tmp_path: Path) -> None:
    records = open_records(tmp_path / "s", SPEC)
    records.write("a", np.zeros(3))
    with pytest.raises(ValueError, match=r"a\.npy', got an array of shape \(3,\)"):
        records.read("a", 2)


@pytest.mark.parametrize("content", ["", "{", "[1]"])
def test_open_records__damaged_spec(tmp_path: Path, content: str) -> None:
    (tmp_path / "spec.json").write_text(content)
    with pytest.raises(ValueError, match=r"spec.*spec\.json', got"):
        open_records(tmp_path, SPEC)
