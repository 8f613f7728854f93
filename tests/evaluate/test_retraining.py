"""Retraining: every model once, on the samples it should, kept whatever is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from distributed import Client

import trakdask as td
from tests.waiting import Overlap, wait_until
from trakdask.evaluate.retraining import model_key
from trakdask.testing import simulate_features

N, TARGETS = 20, 3
MASKS = td.evaluate.subsets(N, 6)
retrain = td.evaluate.retrain


def model(positions: np.ndarray, seed: int) -> np.ndarray:
    """Pass for training: what it was given is all in the outputs."""
    rng = np.random.default_rng(seed)
    return positions.sum() + np.arange(TARGETS) + rng.random(TARGETS)


def expected(masks: xr.DataArray, seeds: int) -> np.ndarray:
    """Model after model; the seed as the documentation defines it."""

    def outputs(mask: np.ndarray, seed: int) -> np.ndarray:
        return model(np.flatnonzero(mask), int(model_key(mask, seed)[:8], 16) // 2)

    return np.array([[outputs(mask, seed) for seed in range(seeds)] for mask in masks.values])


class Counting:
    """The same model; each training leaves a line in a file, in whatever process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def __call__(self, positions: np.ndarray, seed: int) -> np.ndarray:
        with self.path.open("a") as file:
            file.write(f"{positions.tolist()} {seed}\n")
        return model(positions, seed)

    def trained(self) -> list[str]:
        return self.path.read_text().splitlines()


def run(train_fn, store: Path | str, masks: xr.DataArray = MASKS, **options) -> xr.DataArray:
    return retrain(train_fn, masks, TARGETS, store=store, tag="model", progress=False, **options)


def files(store: Path) -> list[Path]:
    return sorted((store / "models").glob("*.npy"))


@pytest.mark.parametrize("scheduler", ["sync", "threads"])
def test_retrain__every_subset_and_seed_on_any_scheduler(scheduler: str) -> None:
    outputs = retrain(model, MASKS.chunk(subset=4, sample=7), TARGETS, seeds=2)
    assert outputs.dims == ("subset", "seed", "target")
    assert outputs.chunks == ((1,) * 6, (1, 1), (3,))
    np.testing.assert_array_equal(outputs.compute(scheduler=scheduler), expected(MASKS, 2))


def test_retrain__carries_the_labels_of_scores_and_masks() -> None:
    train, targets = simulate_features(n_samples=N), simulate_features(n_samples=TARGETS, seed=1)
    scores = td.score(train, targets)
    masks = td.evaluate.leave_one_out(scores, [4, 2])
    outputs = retrain(model, masks, scores, seeds=[5, 3])
    assert set(outputs.coords) == {"left_out", "seed", "target_label"}
    assert outputs.seed.values.tolist() == [5, 3]


def test_retrain__on_worker_processes_with_a_store(process_client: Client, tmp_path: Path) -> None:
    counting = Counting(tmp_path / "log")
    np.testing.assert_array_equal(run(counting, tmp_path / "s", seeds=2), expected(MASKS, 2))
    assert len(counting.trained()) == len(files(tmp_path / "s")) == 12
    np.testing.assert_array_equal(retrain(model, MASKS, TARGETS, seeds=2), expected(MASKS, 2))


def test_retrain__one_model_at_a_time_in_a_process() -> None:
    """Global generators are safe, even on the threaded scheduler."""
    overlap = Overlap()

    def careless(positions: np.ndarray, seed: int) -> np.ndarray:
        np.random.seed(seed)  # noqa: NPY002
        with overlap.entered():
            return np.random.rand(TARGETS)  # noqa: NPY002

    found = retrain(careless, MASKS, TARGETS).compute(scheduler="threads", num_workers=4)
    alone = retrain(careless, MASKS, TARGETS).compute(scheduler="sync")
    np.testing.assert_array_equal(found, alone)
    assert overlap.most == 1


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_retrain__more_subsets_or_seeds_train_what_is_new(tmp_path: Path, scheme: str) -> None:
    counting, store = Counting(tmp_path / "log"), f"{scheme}{tmp_path}/s"
    run(counting, store)
    more = td.evaluate.subsets(N, 8)
    for _ in range(2):
        found = run(counting, store, more, seeds=2)
        np.testing.assert_array_equal(found, expected(more, 2))
    assert len(counting.trained()) == len(set(counting.trained())) == 8 * 2


def test_retrain__killed_and_resumed(tmp_path: Path) -> None:
    """At most the model in flight is trained again: a line is written when training begins."""
    script = textwrap.dedent(
        """
        import sys, threading
        from pathlib import Path
        import dask, trakdask as td
        from tests.evaluate.test_retraining import Counting, TARGETS, N
        class Stuck(Counting):
            def __call__(self, positions, seed):
                outputs = super().__call__(positions, seed)
                if len(self.trained()) == 6:
                    threading.Event().wait()  # the process is killed here
                return outputs
        with dask.config.set(scheduler="sync"):
            td.evaluate.retrain(
                Stuck(Path(sys.argv[1]) / "log"), td.evaluate.subsets(N, 60), TARGETS,
                store=sys.argv[1] + "/s", tag="model", progress=False,
            )
        """
    )
    root = Path(__file__).parents[2]
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], cwd=root)
    counting, masks = Counting(tmp_path / "log"), td.evaluate.subsets(N, 60)
    try:
        wait_until(lambda: len(counting.trained()) == 6 or process.poll(), "the sixth training")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (len(counting.trained()), len(files(tmp_path / "s"))) == (6, 5)
    partial = files(tmp_path / "s")[0].with_name(f"{40 * '0'}.npy.{32 * '0'}.partial")
    partial.write_text("what a process was writing when it was killed")
    np.testing.assert_array_equal(run(counting, tmp_path / "s", masks), expected(masks, 1))
    assert len(counting.trained()) == 6 + 60 - 5


def test_retrain__damaged_file_is_named(tmp_path: Path) -> None:
    run(model, tmp_path / "s")
    damaged = files(tmp_path / "s")[0]
    damaged.write_bytes(b"\x93NUMPY\x01")
    with pytest.raises(ValueError, match=damaged.name):
        run(model, tmp_path / "s")
    damaged.unlink()
    np.testing.assert_array_equal(run(model, tmp_path / "s"), expected(MASKS, 1))


@pytest.mark.parametrize("field", ["tag", "samples", "targets"])
def test_retrain__store_of_other_models_is_refused_by_name(tmp_path: Path, field: str) -> None:
    run(model, tmp_path / "s")
    masks = td.evaluate.subsets(N + (field == "samples"), 6)
    tag, targets = ("mlp" if field == "tag" else "model"), TARGETS + (field == "targets")
    with pytest.raises(td.errors.StoreMismatchError, match=f"differ in {field}"):
        retrain(model, masks, targets, store=tmp_path / "s", tag=tag)


def test_retrain__something_else_in_the_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="something else"):
        run(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
