"""A fit that is stopped anywhere goes on with the blocks that it lacks, and gives the same bits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dask
import pytest
from distributed import Client

from tests.faults._fit import N_BLOCKS, N_CHECKPOINTS, N_PASSES, fit
from tests.faults.test_kills import kill, start
from tests.waiting import wait_until
from trakdask.featurization import block

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TOTAL = N_BLOCKS * N_CHECKPOINTS * N_PASSES


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    with dask.config.set(scheduler="sync"):
        return dict(fit(tmp_path_factory.mktemp("undisturbed") / "f.zarr").digests)


def test_fit__interrupted_again_and_again(
    tmp_path: Path, undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the block that Ctrl-C stops is computed again."""
    begun, left, n_stops = 0, 0, 0

    @contextmanager
    def begin(what: str) -> Iterator[None]:
        nonlocal begun, left
        begun, left = begun + 1, left - 1
        if left == 0:
            raise KeyboardInterrupt
        yield

    monkeypatch.setattr(block, "at_work", begin)
    fitted = None
    while fitted is None:
        left = 4
        try:
            with dask.config.set(scheduler="sync"):
                fitted = fit(tmp_path / "f.zarr")
        except KeyboardInterrupt:
            n_stops += 1
    assert begun == TOTAL + n_stops
    assert n_stops == (TOTAL - 1) // 3
    assert fitted.digests == undisturbed
    assert not (tmp_path / "f.zarr.fit" / "blocks").exists()


@pytest.mark.faults
def test_fit__killed(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    rng, begun = random.Random(0), tmp_path / "begun"
    begun.mkdir()
    n_kills, arguments = 0, ("-m", "tests.faults._fit", str(tmp_path / "f.zarr"), str(begun))
    while True:
        least = len(list(begun.iterdir())) + rng.randrange(8, 16)
        driver = start(tmp_path / "driver.log", *arguments)
        wait_until(
            lambda: len(list(begun.iterdir())) >= least or driver.poll() is not None,  # noqa: B023
            "blocks",
        )
        if driver.poll() is not None:
            break
        kill(driver)
        n_kills += 1
    assert driver.returncode == 0, (tmp_path / "driver.log").read_text()
    assert n_kills >= 2
    assert TOTAL <= len(list(begun.iterdir())) <= TOTAL + 2 * n_kills  # of two threads
    assert fit(tmp_path / "f.zarr").digests == undisturbed


@pytest.mark.parametrize("damage", [b"", b"\0" * 99, None])
def test_fit__computes_damaged_blocks_again(
    tmp_path: Path,
    undisturbed: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    damage: bytes | None,
) -> None:
    begun: list[str] = []

    @contextmanager
    def begin(what: str) -> Iterator[None]:
        begun.append(what)
        if len(begun) == 7:  # the third block of the second pass
            raise KeyboardInterrupt
        yield

    monkeypatch.setattr(block, "at_work", begin)
    with dask.config.set(scheduler="sync"):
        with pytest.raises(KeyboardInterrupt):
            fit(tmp_path / "f.zarr")
        (kept, *_) = files = sorted((tmp_path / "f.zarr.fit" / "blocks").iterdir())
        assert len(files) == 6
        content = kept.read_bytes()
        kept.write_bytes(content[:-200] + b"x" + content[-199:] if damage is None else damage)
        assert fit(tmp_path / "f.zarr").digests == undisturbed
    assert len(begun) == TOTAL + 2


def test_fit__the_same_on_a_cluster(
    tmp_path: Path, undisturbed: dict[str, str], process_client: Client
) -> None:
    assert fit(tmp_path / "f.zarr").digests == undisturbed
    with dask.config.set(scheduler="threads"):
        assert fit(tmp_path / "other.zarr").digests == undisturbed
