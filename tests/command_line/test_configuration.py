"""Configuration files: what is read, what is set, what is kept, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from trakdask.command_line.configuration import (
    SECTIONS,
    ConfigurationError,
    example,
    keep,
    read,
    require_known_options,
    require_not_kept_by_others,
)


def written(folder: Path, text: str, name: str = "job.yaml") -> Path:
    path = folder / name
    path.write_text(text)
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
    assert read(written(tmp_path, in_toml, "job.toml")) == expected


def test_read__settings_are_applied_in_order(tmp_path: Path) -> None:
    path = written(tmp_path, "projector: {kind: SJLT, proj_dim: 64}\ncluster:\n")
    settings = (
        *("projector.proj_dim=128", "projector.proj_dim=256", "top_k.where=label == 3"),
        *("model.task.label=y", "cluster.n_workers=2", "score.damping=1E-2", "save.dtype=null"),
    )
    values = read(path, settings)
    assert values["projector"] == {"kind": "SJLT", "proj_dim": 256}
    assert values["top_k"] == {"where": "label == 3"}
    assert values["model"] == {"task": {"label": "y"}}
    assert values["cluster"] == {"n_workers": 2}
    assert values["score"] == {"damping": 0.01}
    assert values["save"] == {"dtype": None}


@pytest.mark.parametrize(
    ("text", "settings", "words"),
    [
        ("stores: [", (), "cannot be parsed"),
        ("- a\n- b", (), "['a', 'b']"),
        ("", (), "None"),
        ("score: {}\nstores: {}\nscore: {}", (), "'score'"),
        ("score: {damping: 1, damping: 2}", (), "'damping'"),
        ("score: {}", ("score={damping: 1, damping: 2}",), "damping"),
        ("store: {}", (), "got 'store'; try stores"),
        ("stores: {}", ("stores.train",), "'stores.train'"),
        ("stores: {}", ("=3",), "'=3'"),
        ("stores: {}", ("stores..train=3",), "'stores..train=3'"),
        ("stores: {}", ("stores.train=[",), "'stores.train=['"),
        ("stores: {train: a}", ("stores.train.b=3",), "'train'"),
        ("stores: {}", ("other.x=3",), "'other'"),
    ],
)
def test_read__refused(tmp_path: Path, text: str, settings: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigurationError, match=r"expected .*try ") as caught:
        read(written(tmp_path, text), settings)
    assert words in str(caught.value)


def test_read__no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"'.*none\.yaml' \(No such file"):
        read(tmp_path / "none.yaml")


def test_keep__repeats_the_job_without_secrets(tmp_path: Path) -> None:
    path = written(tmp_path, "save: {retries: 2, storage_options: {secret: xyz}}\n")
    keep(read(path, ["top_k.k=5"]), tmp_path / "folder" / "train.zarr")
    kept = tmp_path / "folder" / "train.zarr.yaml"
    assert "xyz" not in kept.read_text()
    assert read(kept) == {"save": {"retries": 2}, "folder": str(tmp_path), "top_k": {"k": 5}}


def test_example__has_only_sections_that_exist() -> None:
    assert set(yaml.safe_load(example())) <= set(SECTIONS)


def call(first: int, second: int = 2, *, third: int = 3) -> None: ...


def test_require_known_options__by_signature() -> None:
    require_known_options(call, {"third": 4}, "here", "first")
    with pytest.raises(ConfigurationError, match="'thrid'; try third"):
        require_known_options(call, {"first": 1, "thrid": 4}, "here")
    with pytest.raises(ConfigurationError, match="got 'first'"):
        require_known_options(call, {"first": 1}, "here", "first")


def test_read__not_in_utf_8(tmp_path: Path) -> None:
    for name in ("job.yaml", "job.toml"):
        (tmp_path / name).write_bytes("folder: 'Müller'".encode("latin-1"))
        with pytest.raises(ConfigurationError, match=name):
            read(tmp_path / name)


def test_require_not_kept_by_others__finds_files_of_the_user(tmp_path: Path) -> None:
    require_not_kept_by_others(tmp_path / "train.zarr")
    keep({"folder": "here"}, tmp_path / "train.zarr")
    require_not_kept_by_others(tmp_path / "train.zarr")
    (tmp_path / "train.zarr.yaml").write_text("# mine")
    with pytest.raises(ConfigurationError, match=r"train\.zarr\.yaml"):
        require_not_kept_by_others(tmp_path / "train.zarr")
