"""Configuration files: reading, values of --set, the copy beside results, and refusals."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

from trakdask.command_line.configuration import ConfigurationError, keep, read


def written(folder: Path, text: str | bytes, name: str = "job.yaml") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_read__yaml_and_toml_are_the_same(tmp_path: Path) -> None:
    in_yaml = "score: {damping: 1e-3, estimator: trak}\nstores:\n  train: a.zarr\n"
    in_toml = "score = {damping = 1e-3, estimator = 'trak'}\n[stores]\ntrain = 'a.zarr'\n"
    expected = {
        "score": {"damping": 0.001, "estimator": "trak"},
        "stores": {"train": "a.zarr"},
        "folder": str(tmp_path),
    }
    assert read(written(tmp_path, in_yaml)) == expected
    path = written(tmp_path, in_toml, "job.toml")
    assert read(path) == expected
    changed = read(path, ["score.damping=2", "score.damping=1E-2", "model.task.label=y"])
    assert changed["score"] == {"damping": 0.01, "estimator": "trak"}
    assert changed["model"] == {"task": {"label": "y"}}


def bomb(template: str) -> str:
    """Return a file whose size, with each alias written out, is 9 to the power of 11."""
    lines = ["  a0: &a0 {x: 1}"]
    for i in range(1, 12):
        again = ", ".join([f"*a{i - 1}"] * 9)
        lines.append(f"  a{i}: &a{i} {template % again}")
    return "\n".join(["data:", *lines])


@pytest.mark.parametrize(
    ("text", "settings", "words"),
    [
        ("stores: [", (), "job.yaml"),
        ("folder: 'Müller'".encode("latin-1"), (), "job.yaml"),
        ("- a\n- b", (), "job.yaml"),
        ("", (), "job.yaml"),
        ("score: {}\nstores: {}\nscore: {}", (), "'score'"),
        ("score: {}", ("score={damping: 1, damping: 2}",), "'damping'"),
        ("store: {}", (), "'store'"),
        ("score: 3", (), "got 3"),
        ("stores: {}", ("stores.train",), "stores.train"),
        ("stores: {}", ("=3",), "''"),
        ("stores: train.zarr", (), "by name in 'stores', got 'train.zarr'"),
        ("stores: {train: a}\noutputs: [top.parquet]", (), "by name in 'outputs'"),
        ("stores: {}", ("stores.train=[",), "stores.train=["),
        ("stores: {}", ("other.x=3",), "'other'"),
        (bomb("{<<: [%s]}"), (), "each alias written out"),
        (bomb("[%s]"), (), "each alias written out"),
        ("data: &a {x: [*a]}", (), "each alias written out"),
        ("data: " + "[" * 999, (), "recursion"),
        ("data: {" + ", ".join(f"k{i}: 0" for i in range(3000)) + ", k7: 1}", (), "'k7'"),
    ],
    ids=itertools.count(),
)
def test_read__refused(
    tmp_path: Path, text: str | bytes, settings: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read(written(tmp_path, text), settings)
    assert words in str(caught.value)


def test_read__aliases_and_merges_of_a_few_values(tmp_path: Path) -> None:
    text = "data: &d {kind: csv, chunks: 3}\ntargets: {<<: *d, chunks: 4}\nmodel: {a: *d}"
    values = read(written(tmp_path, text))
    assert values["targets"] == {"kind": "csv", "chunks": 4}
    assert values["model"] == {"a": values["data"]}


def test_keep__repeats_the_job_without_secrets(tmp_path: Path) -> None:
    path = written(tmp_path, "save: {retries: 2, storage_options: {secret: xyz}}\n")
    keep(read(path, ["top_k.k=5"]), tmp_path / "folder" / "train.zarr")
    kept = tmp_path / "folder" / "train.zarr.yaml"
    assert "xyz" not in kept.read_text()
    assert read(kept) == {"save": {"retries": 2}, "folder": str(tmp_path), "top_k": {"k": 5}}


@pytest.mark.parametrize("store", ["train.zarr", "results/one/train.zarr"])
def test_read__what_was_kept_is_read_where_its_result_was_moved(tmp_path: Path, store: str) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    values = read(written(before, f"stores: {{train: {store}}}"))
    keep(values, before / store)
    (before / store).mkdir()
    shutil.copytree(before, after)
    assert read(after / f"{store}.yaml") == {**values, "folder": str(after)}
    assert read(before / f"{store}.yaml") == values
    (after / f"{store}.yaml").rename(tmp_path / "alone.yaml")
    assert read(tmp_path / "alone.yaml") == values
