"""Scripts that use the package as the examples of the original do, each in a process of its own.

Where the original can run them, they run twice, with only the import changed, and must agree.
"""

from __future__ import annotations

import json
import os
import shutil
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

JOB = """
import argparse
from data import make_checkpoint, make_model, target_batches, targets, train, train_batches
from {package} import TRAKer

parser = argparse.ArgumentParser()
parser.add_argument("--model_id", type=int, required=True)
model_id = parser.parse_args().model_id
checkpoint = make_checkpoint(model_id)

traker = TRAKer(
    model=make_model(),
    task="image_classification",
    save_dir="./together",
    load_from_save_dir=model_id == 0,  # one job looks after the metadata
    train_set_size=len(train),
    device="cpu",
    proj_dim=120,
    use_half_precision=False,
)
traker.load_checkpoint(checkpoint, model_id=model_id)
for batch in train_batches:
    traker.featurize(batch=batch, num_samples=len(batch[0]))
traker.finalize_features(model_ids=[model_id])
traker.start_scoring_checkpoint(
    exp_name="by_jobs", checkpoint=checkpoint, model_id=model_id, num_targets=len(targets)
)
for batch in target_batches:
    traker.score(batch=batch, num_samples=len(batch[0]))
"""

GATHER = """
import numpy as np
from data import make_model
from {package} import TRAKer

traker = TRAKer(
    model=make_model(),
    task="image_classification",
    save_dir="./together",
    train_set_size=200,
    device="cpu",
    proj_dim=120,
    use_half_precision=False,
)
np.save("scores.npy", np.array(traker.finalize_scores(exp_name="by_jobs")))
"""

TEXTS = """
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, default_data_collator
from {package} import TRAKer

N_TRAIN, N_TARGETS = 40, 6


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = BertConfig(
            vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=16, max_position_embeddings=16, num_labels=2,
            attn_implementation="eager",
        )
        self.model = BertForSequenceClassification(self.config).eval()

    def forward(self, input_ids, token_type_ids, attention_mask):
        return self.model(
            input_ids=input_ids, token_type_ids=token_type_ids, attention_mask=attention_mask
        ).logits


def pairs(n, seed):
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(n):
        length, first = int(rng.integers(6, 17)), int(rng.integers(1, 5))
        rows.append({{
            "input_ids": [*rng.integers(1, 30, length).tolist(), *[0] * (16 - length)],
            "token_type_ids": [0] * first + [1] * (16 - first),
            "attention_mask": [1] * length + [0] * (16 - length),
            "label": int(rng.integers(2)),
        }})
    return rows


def in_order(batch):
    names = ("input_ids", "token_type_ids", "attention_mask", "labels")
    return [batch[name] for name in names]


torch.manual_seed(0)
model = Classifier()
saved = {{name: tensor.clone() for name, tensor in model.model.state_dict().items()}}
model.model.load_state_dict(saved)
loaders = [
    DataLoader(pairs(n, seed), batch_size=16, collate_fn=default_data_collator)
    for n, seed in ((N_TRAIN, 1), (N_TARGETS, 2))
]
traker = TRAKer(
    model=model, task="text_classification", train_set_size=N_TRAIN, save_dir="texts",
    device="cpu", proj_dim=16,
)
traker.load_checkpoint(model.state_dict(), model_id=0)
for batch in loaders[0]:
    batch = in_order(batch)
    traker.featurize(batch=batch, num_samples=batch[0].shape[0])
traker.finalize_features()
traker.start_scoring_checkpoint(
    exp_name="texts", checkpoint=model.state_dict(), model_id=0, num_targets=N_TARGETS
)
for batch in loaders[1]:
    batch = in_order(batch)
    traker.score(batch=batch, num_samples=batch[0].shape[0])
scores = traker.finalize_scores(exp_name="texts")
np.save("scores.npy", np.array(scores))
"""

PAIRS = """
import numpy as np
import torch
from torch import nn
from {package} import TRAKer


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual, self.textual = nn.Linear(8, 6), nn.Embedding(20, 6)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image, text):
        return self.visual(image), self.textual(text).mean(1), self.logit_scale.exp()


torch.manual_seed(0)
model = Towers().eval()
images = torch.randn(60, 8)
captions = [["a b", "unused"] if i % 2 else ["c d e", "unused"] for i in range(60)]
dataset = list(zip(images.numpy(), captions))
tokenize = lambda text: torch.tensor([[ord(c) % 20 for c in (text + "    ")[:4]]])

traker = TRAKer(
    model=model, task="clip", train_set_size=60, save_dir="pairs", device="cpu", proj_dim=12
)
traker.task.sim_batch_size = 20
traker.task.get_embeddings(
    model, dataset, batch_size=1, size=30, embedding_dim=6,
    preprocess_fn_img=lambda x: torch.from_numpy(x).unsqueeze(0),
    preprocess_fn_txt=lambda x: tokenize(x[0]),
)
traker.load_checkpoint(model.state_dict(), model_id=0)
for image, caption in dataset:
    x, y = torch.from_numpy(image).unsqueeze(0), tokenize(caption[0])
    traker.featurize(batch=(x, y), num_samples=x.shape[0])
traker.finalize_features()
traker.start_scoring_checkpoint(
    exp_name="pairs", checkpoint=model.state_dict(), model_id=0, num_targets=3
)
for image, caption in dataset[:3]:
    x, y = torch.from_numpy(image).unsqueeze(0), tokenize(caption[0])
    traker.score(batch=(x, y), num_samples=x.shape[0])
scores = traker.finalize_scores(exp_name="pairs")
np.save("features.npy", np.array(traker.saver.current_store["features"]))
"""

WRONG_CALLS = """
from data import make_model, targets, train
from {package} import TRAKer

model = make_model()
checkpoint = model.state_dict()
traker = TRAKer(
    model=model, task="image_classification", train_set_size=len(train), device="cpu", proj_dim=120
)
traker.load_checkpoint(checkpoint, model_id=0)
calls = [
    # The README of the original.
    lambda: traker.start_scoring_checkpoint(
        checkpoint, model_id=0, exp_name="test", num_targets=len(targets)
    ),
    # Its imagenet.py.
    lambda: traker.start_scoring_checkpoint(checkpoint, model_id=0, num_targets=len(targets)),
    lambda: traker.finalize_scores(),
]
for call in calls:
    try:
        call()
    except TypeError as err:
        print("TypeError:", err)
"""

needs_original = pytest.mark.skipif(find_spec("trak") is None, reason="traker is not installed")
packages = pytest.mark.parametrize(
    "package", ["trakdask.trak", pytest.param("trak", marks=[pytest.mark.parity, needs_original])]
)


def start(folder: Path, name: str, script: str, package: str, *args: str) -> subprocess.Popen[str]:
    (folder / "data.py").write_text(DATA)
    (folder / name).write_text(script.format(package=package))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, name, *args],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, output
    return output


def run(folder: Path, name: str, script: str, package: str, *args: str) -> str:
    folder.mkdir(exist_ok=True)
    return finish(start(folder, name, script, package, *args))


def assert_same_scores(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert np.isfinite(expected).all()
    scale = np.abs(expected).max()
    assert scale > 0
    assert np.abs(found - expected).max() <= 1e-4 * scale


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the quickstart has run."""
    folder = tmp_path_factory.mktemp("quickstart")
    run(folder, "quickstart.py", QUICKSTART, "trakdask.trak")
    return folder


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """Scores of two jobs that ran one after the other, the second model first."""
    return scores_of_jobs(tmp_path_factory.mktemp("jobs"), "trakdask.trak", ("1", "0"))


def scores_of_jobs(folder: Path, package: str, model_ids: tuple[str, ...]) -> np.ndarray:
    for model_id in model_ids:
        run(folder, "job.py", JOB, package, "--model_id", model_id)
    run(folder, "gather.py", GATHER, package)
    scores: np.ndarray = np.load(folder / "scores.npy")
    return scores


@pytest.mark.parity
@needs_original
def test_quickstart__with_only_the_import_changed(quickstart: Path, tmp_path: Path) -> None:
    run(tmp_path, "quickstart.py", QUICKSTART, "trak")
    assert_same_scores(np.load(quickstart / "scores.npy"), np.load(tmp_path / "scores.npy"))


def test_quickstart__runs_again_over_what_is_there(quickstart: Path, tmp_path: Path) -> None:
    shutil.copytree(quickstart, tmp_path, dirs_exist_ok=True)
    (tmp_path / "scores.npy").unlink()
    run(tmp_path, "quickstart.py", QUICKSTART, "trakdask.trak")
    again, before = (np.load(folder / "scores.npy") for folder in (tmp_path, quickstart))
    assert np.array_equal(again, before)
    assert before.shape == (200, 11)


@pytest.mark.parity
@needs_original
def test_jobs__as_in_the_original(jobs: np.ndarray, tmp_path: Path) -> None:
    assert_same_scores(jobs, scores_of_jobs(tmp_path, "trak", ("0", "1")))


def test_jobs__at_the_same_time_lose_nothing(jobs: np.ndarray, tmp_path: Path) -> None:
    started = [
        start(tmp_path, "job.py", JOB, "trakdask.trak", "--model_id", str(model_id))
        for model_id in (0, 1)
    ]
    for job in started:
        finish(job)
    run(tmp_path, "gather.py", GATHER, "trakdask.trak")
    assert np.array_equal(np.load(tmp_path / "scores.npy"), jobs)
    for model_id in (0, 1):
        flags = json.loads((tmp_path / f"together/id_{model_id}.json").read_text())
        assert flags == {str(model_id): {"is_featurized": 1, "is_finalized": 1}}
    experiments = json.loads((tmp_path / "together/experiments.json").read_text())
    assert experiments["by_jobs"]["num_targets"] == 11


def test_one_job__and_gather(tmp_path: Path) -> None:
    scores = scores_of_jobs(tmp_path, "trakdask.trak", ("0",))
    assert scores.shape == (200, 11)
    assert np.isfinite(scores).all()
    assert scores.any()


def test_texts__of_a_model_of_transformers(tmp_path: Path) -> None:
    """With transformers 5 the original cannot: the model looks at the attention mask."""
    run(tmp_path, "texts.py", TEXTS, "trakdask.trak")
    scores = np.load(tmp_path / "scores.npy")
    assert scores.shape == (40, 6)
    assert scores.dtype == np.float16
    assert np.isfinite(scores).all()
    assert scores.any()


def test_pairs__run_twice_give_the_same(tmp_path: Path) -> None:
    """One pair at a time, as the docs of the original do; there, Q cannot be stored."""
    found = []
    for name in ("first", "second"):
        run(tmp_path / name, "pairs.py", PAIRS, "trakdask.trak")
        found.append(np.load(tmp_path / name / "features.npy"))
    assert np.array_equal(*found)
    assert found[0].shape == (60, 12)
    assert np.isfinite(found[0]).all()
    assert found[0].any()


@packages
def test_wrong_calls__of_the_original_raise_type_error(package: str, tmp_path: Path) -> None:
    output = run(tmp_path, "wrong.py", WRONG_CALLS, package)
    errors = [line for line in output.splitlines() if line.startswith("TypeError:")]
    assert len(errors) == 3
    if package == "trakdask.trak":
        assert all("; try " in error and "exp_name='test'" in error for error in errors)
