"""The 36 quirks of traker 0.3.2, numbered: each cannot happen here, or it is said why it must stay.

Those of the CLIP task, 22 and 23, stand in ``test_modelout_functions.py``, and more tests of 21, 24
to 26 there and in ``test_gradient_computers.py``; 20, of several jobs, in ``test_traker.py``.
"""

from __future__ import annotations

import logging
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trakdask as td
from tests.projection.test_fast_jl import stand_in_for_fast_jl
from tests.trak._models import checkpoints, images
from tests.trak._runs import M, N, Run, content, started
from trakdask.errors import StoreMismatchError
from trakdask.trak import TRAKer, projectors
from trakdask.trak.modelout_functions import ImageClassificationModelOutput
from trakdask.trak.projectors import AbstractProjector, BasicProjector, CudaProjector
from trakdask.trak.savers import ModelIDException


def featurized(folder: Path, n_checkpoints: int = 1) -> TRAKer:
    run = Run(n_checkpoints=n_checkpoints, options={"lambda_reg": 0.1})
    traker = run.make(TRAKer, folder)
    run.featurize(traker)
    return traker


def finalized(folder: Path, n_checkpoints: int = 1) -> TRAKer:
    traker = featurized(folder, n_checkpoints)
    traker.finalize_features()
    return traker


def targets(n: int = M) -> list[torch.Tensor]:
    return [part[:n] for part in images(M, seed=1)]


def score(traker: TRAKer, model_id: int = 0) -> TRAKer:
    """Compute the gradients of the targets."""
    traker.start_scoring_checkpoint("test", checkpoints("mlp", 2)[model_id], model_id, M)
    traker.score(targets(), num_samples=M)
    return traker


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """Scores by the first checkpoint."""
    traker = score(finalized(tmp_path_factory.mktemp("expected")))
    return np.array(traker.finalize_scores("test"))


def test_4__blocks_beyond_100_share_no_seed_with_the_next_model_id() -> None:
    projector = BasicProjector(4, 10_400, 0, "normal", "cpu")
    seeds = [projector.seeds]
    projector.project(torch.zeros(1, 4), model_id=1)
    seeds.append(projector.seeds)
    assert seeds[0][:100] == [1000 * block for block in range(100)]
    assert len({seed % 2**32 for of_model in seeds for seed in of_model}) == 208


@pytest.mark.parametrize("n_chunks", [4, 8, 30])
def test_6__no_two_chunks_share_a_seed(n_chunks: int) -> None:
    for seed in range(200):
        old = np.random.default_rng(seed).integers(0, 500, size=n_chunks).tolist()
        new = projectors.chunk_seeds(seed, n_chunks)
        assert len(set(new)) == n_chunks
        assert [a for i, a in enumerate(old) if a not in old[:i]] == [
            b for a, b, i in zip(old, new, range(n_chunks), strict=True) if a not in old[:i]
        ]


def test_10__batch_sizes_without_a_kernel(cuda_stand_in: list[tuple[str, Any]]) -> None:
    for most, kernel in ((8, 8), (24, 16), (40, 32), (4, 8)):
        CudaProjector(10, 512, 0, "rademacher", "cuda", most).project(torch.ones(33, 10), 0)
        assert max(int(name.split("_")[-1]) for name, _ in cuda_stand_in) == kernel
        cuda_stand_in.clear()


def test_11__columns_that_fast_jl_cannot_make_fall_back(
    cuda_stand_in: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(projectors, "BasicProjector", lambda *args, **_: calls.append(args))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    projectors.default_projector([10], 100, 0, torch.float32, torch.device("cuda"), 8)
    assert len(calls) == 1


def test_12__a_half_done_batch_is_completed(tmp_path: Path) -> None:
    x, y = images(N)
    for name, n_done in (("whole", 0), ("half", 7)):
        traker = started(tmp_path / name)
        if n_done:
            traker.featurize((x[:n_done], y[:n_done]), inds=np.arange(n_done))
            traker = started(tmp_path / name)
        for start in range(0, N, 12):
            traker.featurize((x[start : start + 12], y[start : start + 12]), num_samples=12)
    half, whole = (content(tmp_path / name) for name in ("half", "whole"))
    assert half["id_0.json"] == {"0": {"is_featurized": 1, "is_finalized": 0}}
    np.testing.assert_array_equal(half["0/grads.mmap"][7:], whole["0/grads.mmap"][7:])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("projector_seed", 1), ("use_half_precision", False), ("grad_wrt", ["3.bias"])),
        *(("projector", td.SJLT(8)), ("proj_dim", 9), ("train_set_size", N + 1)),
    ],
)
def test_14__other_settings_are_refused(tmp_path: Path, option: str, value: object) -> None:
    started(tmp_path)
    before = content(tmp_path)
    for load_from_save_dir in (True, False):
        run = Run(options={option: value, "load_from_save_dir": load_from_save_dir})
        with pytest.raises(AssertionError, match=r"expected .*, got "):
            run.make(TRAKer, tmp_path)
    assert content(tmp_path).keys() == before.keys()


@pytest.mark.parametrize(
    ("missing", "error", "match"),
    [
        ("targets", FileNotFoundError, "model id 1"),
        ("features", ModelIDException, "got 1, which is not"),
    ],
)
def test_15_and_17__allow_skip_skips(
    tmp_path: Path, missing: str, error: type[Exception], match: str, expected: np.ndarray
) -> None:
    traker = featurized(tmp_path, n_checkpoints=2)
    traker.finalize_features(model_ids=[0] if missing == "features" else None)
    for model_id in (0, 1) if missing == "features" else (0,):
        score(traker, model_id)
    with pytest.raises(error, match=match):
        traker.finalize_scores("test")
    np.testing.assert_array_equal(traker.finalize_scores("test", allow_skip=True), expected)


def test_16__another_number_of_targets_is_refused_and_scores_stay(
    tmp_path: Path, expected: np.ndarray
) -> None:
    traker = score(finalized(tmp_path, n_checkpoints=2))
    traker.finalize_scores("test", model_ids=[0])
    with pytest.raises(StoreMismatchError, match=f"num_targets={M}"):
        traker.start_scoring_checkpoint("test", checkpoints("mlp", 1)[0], 0, M + 1)
    traker.start_scoring_checkpoint("test", checkpoints("mlp", 2)[1], 1, M)
    np.testing.assert_array_equal(np.load(tmp_path / "scores/test.mmap"), expected)


def test_17__targets_can_be_scored_before_features_are_finalized(
    tmp_path: Path, expected: np.ndarray
) -> None:
    traker = score(featurized(tmp_path))
    traker.finalize_features()
    np.testing.assert_array_equal(traker.finalize_scores("test"), expected)


def test_27__an_id_without_gradients_can_be_opened_and_scored(
    tmp_path: Path, expected: np.ndarray
) -> None:
    traker = featurized(tmp_path)
    traker.finalize_features(del_grads=True)
    assert not (tmp_path / "0/grads.mmap").exists()
    Run().featurize(traker)  # all rows are done
    np.testing.assert_array_equal(score(traker).finalize_scores("test"), expected)


def test_29__targets_get_the_matrix_of_their_own_model_id(
    tmp_path: Path, expected: np.ndarray
) -> None:
    traker = finalized(tmp_path, n_checkpoints=2)
    states = checkpoints("mlp", 2)
    traker.start_scoring_checkpoint("test", states[0], 0, M)
    traker.saver.load_current_store(1)  # as finalize_features does if there is something to do
    traker.score(targets(), num_samples=M)
    np.testing.assert_array_equal(traker.finalize_scores("test", model_ids=[0]), expected)
    traker.start_scoring_checkpoint("test", states[0], 0, M)
    traker.load_checkpoint(states[0], model_id=0)
    traker.score(targets(), num_samples=M)  # id 0 has these weights
    traker.load_checkpoint(states[1], model_id=2)
    with pytest.raises(AssertionError, match="start_scoring_checkpoint"):
        traker.score(targets(), num_samples=M)


def test_30__lists_nothing_to_do_targets_left_out_and_no_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    traker = started(tmp_path, logging_level=logging.WARNING, lambda_reg=0.1)
    x, y = images(N)
    traker.featurize((x, y), inds=list(range(N)))
    assert traker.featurize((x, y), inds=list(range(N))) is None
    traker.start_scoring_checkpoint("test", checkpoints("mlp", 1)[0], 0, M)
    traker.score(targets(4), inds=[0, 1, 2, 4])
    with pytest.raises(ModelIDException, match="finalized"):
        traker.finalize_scores("test")
    traker.finalize_features()
    scores = traker.finalize_scores("test")
    assert np.isnan(scores).all(axis=0).tolist() == [False, False, False, True, False, True]
    assert "2 of 6 targets" in caplog.text


def test_34_and_36__finalizing_twice_and_what_a_custom_projector_returned(tmp_path: Path) -> None:
    class Ones(AbstractProjector):
        ones = torch.ones(N, 3)

        def __init__(self) -> None:
            super().__init__(103, 3, 0, "ones", "cpu")

        def project(self, grads: Any, model_id: int) -> torch.Tensor:
            return self.ones

    task = ImageClassificationModelOutput  # as a class, which quirk 36 did not take
    traker = started(tmp_path, projector=Ones(), lambda_reg=1.0, task=task)
    traker.featurize(images(N), num_samples=N)
    assert bool((Ones.ones == 1).all())
    traker.finalize_features()
    traker.finalize_features()


@pytest.fixture
def cuda_stand_in(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Let CudaProjector run on the CPU with a stand-in for its extension; list its calls."""
    properties = types.SimpleNamespace(multi_processor_count=108, total_memory=2**40)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: zeros(*a, **{**k, "device": "cpu"}))
    return stand_in_for_fast_jl(monkeypatch)


def test_steps__that_were_left_out_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    empty = Run().make(TRAKer, tmp_path / "empty")
    with pytest.raises(ModelIDException, match="got none; try load_checkpoint and featurize"):
        empty.finalize_features()
    traker = featurized(tmp_path / "f")
    with caplog.at_level("WARNING", "TRAK"):
        score(traker)
    assert "call finalize_features before finalize_scores" in caplog.text
    with pytest.raises(ModelIDException, match="which is not; try finalize_features"):
        traker.finalize_scores("test")
    traker.finalize_features()
    traker.start_scoring_checkpoint("other", checkpoints("mlp", 1)[0], 0, M)
    with pytest.raises(FileNotFoundError, match="got none; try start_scoring_checkpoint and score"):
        traker.finalize_scores("other")
