from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trakdask.trak.savers import EXTRA, MmapSaver, ModelIDException

METADATA = {"JL dimension": 3, "JL matrix type": "normal", "train set size": 5}


def opened(folder: Path, half: bool = True, load: bool = True) -> MmapSaver:
    return MmapSaver(folder, METADATA, 5, 3, load, 100, half)


def registered(folder: Path, half: bool = True) -> MmapSaver:
    saver = opened(folder, half)
    saver.register_model_id(0, _allow_featurizing_already_registered=False)
    return saver


def test_init__finds_what_is_there_but_not_in_subfolders(tmp_path: Path) -> None:
    registered(tmp_path)
    registered(tmp_path / "nested").register_model_id(7, False)
    assert list(opened(tmp_path).model_ids) == [0]
    assert opened(tmp_path, load=False).model_ids == {}


def test_init__does_not_continue_a_run_of_the_original(tmp_path: Path) -> None:
    opened(tmp_path)  # the original writes these three keys and no more
    with pytest.raises(AssertionError, match="open_traker"):
        MmapSaver(tmp_path, {**METADATA, EXTRA: {}}, 5, 3, True, 100, True)


def test_settle_lambda__is_the_same_for_all_features(tmp_path: Path) -> None:
    registered(tmp_path).settle_lambda(0.5)
    opened(tmp_path).settle_lambda(0.5)
    with pytest.raises(AssertionError, match=r"lambda_reg=0.5.*got 0.25"):
        opened(tmp_path).settle_lambda(0.25)


def test_init_experiment__new_targets_are_nan_and_old_ones_stay(tmp_path: Path) -> None:
    saver = registered(tmp_path)
    saver.init_experiment("test", 2, 0)
    assert np.isnan(saver.current_store["test_grads"]).all()
    saver.current_store["test_grads"][0] = 1
    saver.init_experiment("test", 2, 0)
    assert saver.current_store["test_grads"][0].tolist() == [1, 1, 1]
    with pytest.raises(ModelIDException, match="got 3"):
        saver.init_experiment("test", 2, 3)
