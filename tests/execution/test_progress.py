"""The bar counts completed work, in terminals and notebooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import numpy as np
import pytest
import torch

import trakdask as td
from tests.waiting import wait_until
from trakdask import bars


@pytest.mark.usefixtures("client")
def test_save__bar_of_a_run_and_of_one_that_finds_all_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    features = td.testing.simulate_features(40, 8, chunks=16)
    for _ in range(2):  # and again where all is there
        td.save(features, tmp_path / "f.zarr")
        assert "save f.zarr" in (shown := capsys.readouterr().out)
        assert "6/6" in shown


class Thirteen(td.tasks.ImageClassification):
    """Stops at an image of thirteens, as Ctrl-C does."""

    def output(self, forward: Any, batch: Any) -> torch.Tensor:
        if (batch["image"][:, 0] == 13).any():
            raise ValueError("thirteen")
        return super().output(forward, batch)


@pytest.mark.parametrize("scheduler", ["sync", "threads", "client", "process_client"])
def test_block_bar__counts_micro_batches_of_the_graphs_of_its_body(
    scheduler: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if "client" in scheduler:
        request.getfixturevalue(scheduler)
    else:
        monkeypatch.setitem(dask.config.config, "scheduler", scheduler)
    images = np.arange(32, dtype="f4")[:, None].repeat(4, 1)
    images[13], images[28] = 0, 13  # in the second half of the last of four blocks
    samples = td.from_arrays({"image": images, "label": np.arange(32) % 3}, chunks=8)
    model = td.Model(torch.nn.Linear(4, 3), task=Thirteen())
    options = {"projector": td.SJLT(4), "batch_size": 4, "gradients": "loop"}
    other = td.featurize(samples.isel(sample=slice(8)), model, **options)

    def wait_for(blocks: float) -> None:
        (_, shares) = bars._SHARES.values()
        wait_until(lambda: sum(shares.values()) == blocks, "blocks to be counted")

    def interrupted() -> None:
        with bars.block_bar("fit", 10):
            bars.skipped("kept", 1)
            features = td.featurize(samples, model, **options).feature.data
            features[:24].compute()
            other.feature.data.compute()
            wait_for(3)
            try:
                features[24:].compute()
            finally:
                wait_for(3.5)

    with pytest.raises(td.errors.BlockError, match="thirteen"):
        interrupted()
    shown = capsys.readouterr().out
    assert "45%" in shown
    assert "4/10" in shown
    assert not bars._SHARES
    with bars.block_bar("fit", 10):
        pass
    assert "10/10" in capsys.readouterr().out


def test_block_bar__estimates_once_from_blocks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, said, counts = 0.0, [], []

    @contextmanager
    def captured(title: str, total: int, count: Callable[[], float], show: bool) -> Iterator[Any]:
        counts.append(count)
        yield said.append

    monkeypatch.setattr(bars, "polled_bar", captured)
    monkeypatch.setattr(bars, "time", SimpleNamespace(monotonic=lambda: seconds))
    with bars.block_bar("fit", 20, estimate=lambda left_s, block_s: f"{left_s}, {block_s}"):
        bars.counted("pass")
        bars.skipped("kept", 2)
        # The first half of a block comes after 100 s, others take 8 s.
        for seconds, share in ((50.0, 0), (100.0, 0.5), (104.0, 1), (112.0, 2), (120.0, 3)):
            for i in range(int(share + 0.5)):
                bars.note_share("pass", f"block {i}", min(share - i, 1))
            assert counts[0]() == 2 + share
            assert said == ([f"{8.0 * (20 - 4)}, 8.0"] if seconds > 104 else [])
