"""The quickstart of the original runs in a process of its own, with only the import changed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT = 240

pytestmark = pytest.mark.slow

DATA = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

N_TRAIN, N_TARGETS, CLASSES = 200, 11, 3


def make_model():
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES)
    ).eval()


def make_checkpoint(i):
    # Weights as after training: another seed each, with running statistics that are not 0 and 1.
    torch.manual_seed(100 + i)
    state = make_model().state_dict()
    for name, tensor in state.items():
        if tensor.is_floating_point():
            tensor += 0.3 * torch.rand_like(tensor)
    return state


def make_images(n, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(n, 1, 6, 6, generator=generator)
    labels = torch.randint(CLASSES, (n,), generator=generator)
    return TensorDataset(images, labels)


train, targets = make_images(N_TRAIN, 1), make_images(N_TARGETS, 2)
train_batches = DataLoader(train, batch_size=64)
target_batches = DataLoader(targets, batch_size=8)
"""

QUICKSTART = """
import numpy as np
from data import N_TARGETS, make_checkpoint, make_model, target_batches, train, train_batches
from {package} import TRAKer

checkpoints = [make_checkpoint(i) for i in range(2)]
traker = TRAKer(
    model=make_model(),
    task="image_classification",
    proj_dim=120,
    train_set_size=len(train),
    device="cpu",
    use_half_precision=False,
)
for model_id, checkpoint in enumerate(checkpoints):
    traker.load_checkpoint(checkpoint, model_id=model_id)
    for batch in train_batches:
        batch = [tensor.to("cpu") for tensor in batch]
        traker.featurize(batch=batch, num_samples=batch[0].shape[0])
traker.finalize_features()

for model_id, checkpoint in enumerate(checkpoints):
    traker.start_scoring_checkpoint(
        exp_name="pictures", checkpoint=checkpoint, model_id=model_id, num_targets=N_TARGETS
    )
    for batch in target_batches:
        traker.score(batch=batch, num_samples=len(batch[0]))
scores = traker.finalize_scores(exp_name="pictures")

reopened = np.lib.format.open_memmap("./trak_results/scores/pictures.mmap")
assert np.array_equal(reopened, scores)
best = scores[:, 3].argsort()[-5:][::-1]
assert all(scores[best[i], 3] >= scores[best[i + 1], 3] for i in range(4))
images = [train[int(i)][0] for i in best]
np.save("scores.npy", np.array(scores))
"""


needs_original = pytest.mark.skipif(find_spec("trak") is None, reason="traker is not installed")


def run(folder: Path, name: str, script: str, package: str) -> None:
    """Run a script in a folder of its own, in a process of its own."""
    folder.mkdir(exist_ok=True)
    (folder / "data.py").write_text(DATA)
    (folder / name).write_text(script.format(package=package))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, name]
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stderr


def assert_same_scores(expected: np.ndarray, found: np.ndarray) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert np.isfinite(expected).all()
    scale = np.abs(expected).max()
    assert scale > 0
    assert np.abs(found - expected).max() <= 1e-4 * scale


@pytest.mark.parity
@needs_original
def test_quickstart__with_only_the_import_changed(tmp_path: Path) -> None:
    for package in ("trakdask.trak", "trak"):
        run(tmp_path / package, "quickstart.py", QUICKSTART, package)
    found, expected = (
        np.load(tmp_path / name / "scores.npy") for name in ("trakdask.trak", "trak")
    )
    assert_same_scores(found, expected)
