"""Directories of the original are continued by trakdask.trak, and the other way round.

The oracle is a run of the original that nobody interrupted. A run here changes hands once: one
package does the first steps of a script, and the other is given the whole script again, as users
do after an interruption.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trakdask as td
from tests.trak._runs import QUIET, built, content, images, relative
from trakdask import trak as ours

original = pytest.importorskip("trak")

pytestmark = pytest.mark.parity

IDS = (3, 10)
N, M, BATCH = 48, 6, 16
TRAIN, TARGETS = images(N), images(M, seed=1)
ROWS = [np.arange(start, start + BATCH) for start in range(0, N, BATCH)]
Step = Callable[["Script"], None]


class Script:
    """A user's script, as single steps; a new TRAKer before each stage, as in separate jobs."""

    def __init__(self, package: Any, folder: Path, **options: Any) -> None:
        self.package, self.folder = package, folder
        self.options = {"proj_dim": 120, "use_half_precision": False, "lambda_reg": 0.1, **options}
        self.traker: Any = None

    def start(self) -> None:
        self.traker = self.package.TRAKer(
            model=built("mlp"),
            task="image_classification",
            train_set_size=N,
            save_dir=self.folder,
            device="cpu",
            logging_level=QUIET,
            **self.options,
        )

    def load(self, id: int) -> None:
        self.traker.load_checkpoint(built("mlp", id).state_dict(), model_id=id)

    def featurize(self, rows: np.ndarray) -> None:
        self.traker.featurize([part[rows] for part in TRAIN], inds=rows)

    def start_scoring(self, id: int, exp_name: str = "test") -> None:
        self.traker.start_scoring_checkpoint(
            exp_name, built("mlp", id).state_dict(), id, num_targets=M
        )

    def score(self, rows: np.ndarray) -> None:
        self.traker.score([part[rows] for part in TARGETS], inds=rows)


def featurizing(ids: Iterable[int] = IDS) -> list[Step]:
    """Return the steps up to finalized features."""
    steps: list[Step] = [lambda s: s.start()]
    for id in ids:
        steps.append(lambda s, id=id: s.load(id))
        steps += [lambda s, rows=rows: s.featurize(rows) for rows in ROWS]
    return [*steps, lambda s: s.traker.finalize_features()]


def scoring(ids: Iterable[int] = IDS, exp_name: str = "test") -> list[Step]:
    """Return the steps from finalized features to scores."""
    steps: list[Step] = [lambda s: s.start()]
    for id in ids:
        steps.append(lambda s, id=id: s.start_scoring(id, exp_name))
        steps += [lambda s, rows=rows: s.score(rows) for rows in np.split(np.arange(M), 2)]
    return [*steps, lambda s: s.traker.finalize_scores(exp_name)]


def run(script: Script, steps: Iterable[Step]) -> None:
    for step in steps:
        step(script)


WHOLE = [*featurizing(), *scoring()]
CUTS = range(1, len(WHOLE))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    run(Script(original, folder), WHOLE)
    return folder


def without_paths(found: dict[str, Any]) -> dict[str, Any]:
    """Take out what tells the folder, and what trakdask.trak adds to the metadata."""
    found = {name: value for name, value in found.items() if name.endswith((".json", ".mmap"))}
    experiments = found["experiments.json"].items()
    found["experiments.json"] = {
        name: {**about, "scores_path": Path(about["scores_path"]).name}
        for name, about in experiments
    }
    found["metadata.json"].pop("trakdask", None)
    return found


def require_same_run(folder: Path, expected: Path, *, within: float) -> None:
    """Compare the JSON, and dtype, shape and values of all arrays."""
    found, wanted = (without_paths(content(each)) for each in (folder, expected))
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        if name.endswith(".json"):
            assert found[name] == value, name
        else:
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
            assert relative(found[name], value) < within, name


# ---------------------------------------------------------------------------- the run changes hands


@pytest.mark.parametrize("cut", CUTS)
def test_resume__ours_continues_the_original(cut: int, tmp_path: Path, undisturbed: Path) -> None:
    run(Script(original, tmp_path), WHOLE[:cut])
    run(Script(ours, tmp_path), WHOLE)
    require_same_run(tmp_path, undisturbed, within=1e-5)


@pytest.mark.parametrize("cut", CUTS)
def test_resume__the_original_continues_ours(cut: int, tmp_path: Path, undisturbed: Path) -> None:
    run(Script(ours, tmp_path), WHOLE[:cut])
    run(Script(original, tmp_path), WHOLE)
    require_same_run(tmp_path, undisturbed, within=1e-5)


@pytest.mark.parametrize("options", [{"proj_dim": 8}, {"use_half_precision": True}], ids=str)
@pytest.mark.parametrize("ours_first", [False, True])
def test_resume__other_settings(ours_first: bool, options: dict[str, Any], tmp_path: Path) -> None:
    """One block of the matrix; float16, in which the original also sums Gram matrices."""
    first, second = (ours, original) if ours_first else (original, ours)
    run(Script(original, tmp_path / "undisturbed", **options), WHOLE)
    for cut in (4, len(featurizing()), len(WHOLE) - 2):
        folder = tmp_path / f"cut{cut}"
        run(Script(first, folder, **options), WHOLE[:cut])
        run(Script(second, folder, **options), WHOLE)
        within = 0.05 if options.get("use_half_precision") else 1e-5
        require_same_run(folder, tmp_path / "undisturbed", within=within)


@pytest.mark.parametrize("ours_first", [False, True])
def test_resume__what_was_there_keeps_its_bytes(ours_first: bool, tmp_path: Path) -> None:
    """Finished rows, finished checkpoints, other experiments and the metadata are not written."""
    first, second = (ours, original) if ours_first else (original, ours)
    run(Script(first, tmp_path), [*featurizing(IDS[:1]), *scoring(IDS[:1], "before")])
    run(Script(first, tmp_path), featurizing(IDS)[:7])  # starts the second checkpoint
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    partial = np.load(tmp_path / "10" / "grads.mmap")
    done = np.load(tmp_path / "10" / "_is_featurized.mmap")[:, 0] == 1
    assert 0 < done.sum() < N

    run(Script(second, tmp_path), [*featurizing(), *scoring()])
    assert np.load(tmp_path / "10" / "grads.mmap")[done].tobytes() == partial[done].tobytes()
    kept = [p for p in before if p.parent.name == "3" or p.name in ("metadata.json", "before.mmap")]
    assert len(kept) == 7
    for path in kept:
        assert path.read_bytes() == before[path], path


@pytest.mark.parametrize("ours_first", [False, True])
def test_resume__each_checkpoint_by_another_package(
    ours_first: bool, tmp_path: Path, undisturbed: Path
) -> None:
    first, second = (ours, original) if ours_first else (original, ours)
    run(Script(first, tmp_path), featurizing(IDS[:1]))
    run(Script(second, tmp_path), featurizing(IDS))
    run(Script(first, tmp_path), scoring(IDS[:1])[:-1])
    run(Script(second, tmp_path), [scoring()[0], *scoring(IDS[1:])[1:]])
    require_same_run(tmp_path, undisturbed, within=1e-5)


@pytest.mark.parametrize("cut", [2, 4, 7, len(featurizing()), len(featurizing()) + 3])
def test_resume__headers_are_those_of_the_original(cut: int, tmp_path: Path) -> None:
    """At any time, each array has the same bytes before its data: other readers know the format."""
    for name, package in {"theirs": original, "ours": ours}.items():
        run(Script(package, tmp_path / name), WHOLE[:cut])
    arrays = sorted((tmp_path / "theirs").rglob("*.mmap"))
    assert arrays
    for path in arrays:
        mine = tmp_path / "ours" / path.relative_to(tmp_path / "theirs")
        assert mine.read_bytes()[:128] == path.read_bytes()[:128], mine
        assert mine.stat().st_size == path.stat().st_size
    flags = [path for path in arrays if path.name == "_is_featurized.mmap"]
    for path in flags:
        mine = tmp_path / "ours" / path.relative_to(tmp_path / "theirs")
        assert mine.read_bytes() == path.read_bytes()


# ----------------------------------------------------------------------- directories as they happen


def test_resume__a_directory_that_was_moved(tmp_path: Path, undisturbed: Path) -> None:
    """experiments.json names the scores by their old path, which must not be written again."""
    run(Script(original, tmp_path / "old"), WHOLE[:-3])
    (tmp_path / "old").rename(tmp_path / "new")
    run(Script(ours, tmp_path / "new"), WHOLE)
    assert not (tmp_path / "old").exists()
    require_same_run(tmp_path / "new", undisturbed, within=1e-5)


def test_resume__jobs_without_metadata(tmp_path: Path, undisturbed: Path) -> None:
    """The SLURM example: jobs with load_from_save_dir=False write neither metadata nor experiments.

    The original cannot score then; its features are used as they are.
    """
    for id in IDS:
        script = Script(original, tmp_path, load_from_save_dir=False)
        run(script, featurizing([id])[:-1])
        script.traker.finalize_features(model_ids=[id])
    grads = {id: (tmp_path / str(id) / "grads.mmap").read_bytes() for id in IDS}
    run(Script(ours, tmp_path), WHOLE)
    for id in IDS:
        assert (tmp_path / str(id) / "grads.mmap").read_bytes() == grads[id]
    require_same_run(tmp_path, undisturbed, within=1e-5)


def test_resume__a_run_inside_is_another_run(tmp_path: Path, undisturbed: Path) -> None:
    """The original takes its checkpoints for those of the outer run."""
    run(Script(original, tmp_path), WHOLE[:4])
    shutil.copytree(undisturbed, tmp_path / "inner")
    (tmp_path / "inner" / "id_10.json").write_text('{"7": {"is_featurized": 1, "is_finalized": 1}}')
    script = Script(ours, tmp_path)
    run(script, WHOLE)
    assert sorted(script.traker.saver.model_ids) == list(IDS)
    shutil.rmtree(tmp_path / "inner")
    require_same_run(tmp_path, undisturbed, within=1e-5)


def test_resume__one_more_checkpoint_leaves_finished_scores(tmp_path: Path) -> None:
    """The original sets them to zero as soon as another checkpoint is announced."""
    run(Script(original, tmp_path), [*featurizing(IDS[:1]), *scoring(IDS[:1])])
    scores = (tmp_path / "scores" / "test.mmap").read_bytes()
    run(Script(ours, tmp_path), featurizing())
    run(Script(ours, tmp_path), [scoring()[0], *scoring(IDS[1:])[1:-1]])
    assert (tmp_path / "scores" / "test.mmap").read_bytes() == scores


def test_resume__open_traker_reads_what_both_have_written(tmp_path: Path) -> None:
    run(Script(original, tmp_path), featurizing(IDS[:1]))
    run(Script(ours, tmp_path), WHOLE)
    features, targets = td.open_traker(tmp_path, "test")
    assert features.checkpoint.values.tolist() == ["3", "10"]
    assert np.isfinite(td.score(features, targets, damping=td.Absolute(0.1))).all()


# -------------------------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"proj_dim": 121}, "121"),
        ({"use_half_precision": True}, "float32"),
        ({"mode": "trakdask"}, "trakdask"),
    ],
    ids=str,
)
def test_resume__other_settings_than_the_original_had(
    options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    run(Script(original, tmp_path), featurizing()[:4])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.mmap")}
    with pytest.raises((AssertionError, ValueError), match=named):
        run(Script(ours, tmp_path, **options), featurizing())
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.mmap")} == before


def test_resume__the_original_refuses_mode_trakdask_by_its_matrix(tmp_path: Path) -> None:
    """What it can see of the mode is the type of the matrix."""
    run(Script(ours, tmp_path, mode="trakdask", proj_dim=512), featurizing()[:4])
    recorded = json.loads((tmp_path / "metadata.json").read_text())
    with pytest.raises(AssertionError, match="JL matrix"):
        Script(original, tmp_path, proj_dim=recorded["JL dimension"]).start()
