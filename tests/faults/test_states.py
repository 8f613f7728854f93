"""Any order of saving, crashing, resuming, appending, dropping, damaging and mending.

The oracle is what a list of integer arrays in memory says: sums of them are exact.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from pathlib import Path

import dask
import numpy as np
import pytest
import xarray as xr
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import trakdask as td
from tests.storage.integers import assert_rows, features

ROWS = 10
SOURCES = ("0:10", "10:20", "20:30")
Save = tuple[str, tuple[str, ...], str | None]
"""Source, checkpoints and append_dim of a call of save."""


class Crash(BaseException):
    """Ends a save between two blocks, as a signal would."""


def rows_of(source: str) -> slice:
    return slice(*map(int, source.split(":")))


def crashing(source: str, checkpoints: tuple[str, ...], budget: int) -> xr.Dataset:
    """Return features whose blocks crash once the budget is spent."""
    left = [budget]

    def spend(block: np.ndarray) -> np.ndarray:
        left[0] -= 1
        if left[0] < 0:
            raise Crash
        return block

    return features(rows_of(source), checkpoints, block=4, each=spend)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.store = self.folder / "f.zarr"
        self.sources = [*SOURCES[:1]]
        self.checkpoints = ["c0"]
        self.saves: list[Save] = [(SOURCES[0], ("c0",), None)]
        self.pending: list[Save] = list(self.saves)
        self.dropped: set[int] = set()
        self.marks: dict[int, int] = {}
        self.is_append = False

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    def save(self, call: Save, budget: int) -> bool:
        """Save; return whether it came to its end."""
        source, checkpoints, append_dim = call
        given = crashing(source, checkpoints, budget)
        marks = [self.marks.get(number, 0) for number in given.number.values]
        given = given.assign_coords(mark=("sample", marks))
        try:
            with warnings.catch_warnings():
                if len(self.pending) > 1:  # others lack this checkpoint
                    warnings.filterwarnings("ignore", ".*no unfinished append")
                td.save(given, self.store, append_dim=append_dim, progress=False)
        except Crash:
            return False
        except td.errors.IncompleteFeaturesError:
            assert len(self.pending) > 1  # others lack blocks
        return True

    @rule(budget=st.integers(0, 8))
    @precondition(lambda self: self.pending)
    def resume(self, budget: int) -> None:
        if self.save(self.pending[0], budget):
            self.pending.pop(0)

    @rule(budget=st.integers(0, 8))
    @precondition(lambda self: not self.pending and len(self.sources) < 3)
    def append_samples(self, budget: int) -> None:
        source = SOURCES[len(self.sources)]
        self.sources.append(source)
        self.begin([(source, tuple(self.checkpoints), "sample")], budget)

    @rule(budget=st.integers(0, 8))
    @precondition(lambda self: not self.pending and len(self.checkpoints) < 3)
    def append_checkpoint(self, budget: int) -> None:
        name = f"c{len(self.checkpoints)}"
        self.checkpoints.append(name)
        self.begin([(source, (name,), "checkpoint") for source in self.sources], budget)

    def begin(self, calls: list[Save], budget: int) -> None:
        self.saves += calls
        self.pending = calls
        self.is_append = True
        self.resume(budget)

    @rule(number=st.integers(0, 29))
    @precondition(lambda self: not self.pending)
    def drop(self, number: int) -> None:
        here = range(ROWS * len(self.sources))
        gone = ({number} & {*here}) - self.dropped
        opened = td.drop(self.store, where=lambda ds: ds.number == number)
        self.dropped |= gone
        assert opened.sizes["sample"] == len(here) - len(self.dropped)

    @rule(number=st.integers(0, 29), mark=st.integers(-3, -1))
    @precondition(lambda self: not self.pending)
    def assign(self, number: int, mark: int) -> None:
        """Change the coord ``mark`` of one sample, if it is there."""
        opened = td.open(self.store)
        marks = np.where(opened.number == number, mark, opened.mark)
        if number in opened.number:
            self.marks[number] = mark
        np.testing.assert_array_equal(td.assign_coords(self.store, {"mark": marks}).mark, marks)

    @rule(which=st.integers(0, 10**6), kind=st.sampled_from(["flip", "tear", "lose"]))
    @precondition(lambda self: not self.pending)
    def damage_and_mend(self, which: int, kind: str) -> None:
        chunks = sorted(self.store.glob("feature/c.*.0.*"))
        chunk = chunks[which % len(chunks)]
        data = bytearray(chunk.read_bytes())
        data[which % len(data)] ^= 1 << which % 8
        if kind == "lose":
            chunk.unlink()
        else:
            chunk.write_bytes(data if kind == "flip" else data[:-1])
        found = td.verify(self.store, checksums=True, repair=True)
        assert list(found.path) == [str(chunk.relative_to(self.store))]
        self.is_append = False
        for call in self.saves:  # all but one have nothing to do
            self.pending = [*self.saves]
            assert self.save(call, 100)
        self.pending = []

    @invariant()
    def opens_as_it_should(self) -> None:
        if not self.store.exists():
            return
        if self.pending and not self.is_append:
            with pytest.raises((td.errors.IncompleteFeaturesError, FileNotFoundError)):
                td.open(self.store)
            return
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            opened = td.open(self.store)
        assert len(caught) < 2
        assert all("no unfinished append" in str(each.message) for each in caught)
        assert not caught or self.pending
        self.looks_as_before_or_after(opened)

    def looks_as_before_or_after(self, opened: xr.Dataset) -> None:
        """Require the complete samples, and nothing of an unfinished append."""
        sources, checkpoints = self.sources, self.checkpoints
        if self.pending and self.pending[0][2] == "sample":
            sources = sources[:-1]
        elif self.pending:
            checkpoints = checkpoints[:-1]
        left = [n for n in range(ROWS * len(sources)) if n not in self.dropped]
        marks = np.array([self.marks.get(number, 0) for number in left])
        np.testing.assert_array_equal(opened.mark, marks)
        assert_rows(opened.drop_vars("mark"), left, len(checkpoints))
        if not self.pending:
            assert td.verify(self.store, checksums=True).empty


@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "n", [pytest.param(5, marks=pytest.mark.slow), pytest.param(50, marks=pytest.mark.faults)]
)
def test_store__any_order_of_events(n: int) -> None:
    with dask.config.set(scheduler="sync"):
        run_state_machine_as_test(
            StoreMachine, settings=settings(max_examples=n, stateful_step_count=10)
        )
