"""EK-FAC of kronfluence on tasks of the quality benchmark: LDS at several dampings, and its time.

    pip install -c constraints.txt -e '.[demo,peers]'
    python tests/benchmarks/peer_kronfluence.py --cache demo-output/quality    # half an hour

The same checkpoints, samples and targets as in fits.py. Factors are those of the true Fisher
matrix, with labels drawn from the model. The measurement is the margin, as for td.score. A mean
over checkpoints is one of scores, as in td.score. Only weights of linear layers and convolutions
count, which is all that kronfluence analyses, so tasks with attention are left out.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from _fits import ALL, N_CHECKPOINTS, arguments_of
from _quality_scores import ground
from _quality_truth import checkpoints
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import trakdask as td

TASKS = ("mlp", "cnn", "cnn-bn", "resnet", "noisy", "plain", "wide", "cancer", "wine")
DAMPINGS = {"1e-8 (its default)": 1e-8, "0.1 mean": None, "1e-4": 1e-4, "1e-3": 1e-3, "1e-2": 1e-2}
Batch = tuple[Tensor, Tensor]


def margin_task() -> Any:
    """Return cross-entropy, and the margin as what is explained, as kronfluence takes them."""
    from kronfluence.task import Task  # optional: of the extra "peers"

    class Margin(Task):
        def compute_train_loss(
            self, batch: Batch, model: nn.Module, sample: bool = False
        ) -> Tensor:
            logits = model(batch[0])
            drawn = torch.multinomial(logits.detach().softmax(1), 1)[:, 0] if sample else batch[1]
            return F.cross_entropy(logits, drawn, reduction="sum")

        def compute_measurement(self, batch: Batch, model: nn.Module) -> Tensor:
            log_p = model(batch[0]).log_softmax(1).gather(1, batch[1][:, None])[:, 0]
            return -(log_p - torch.log(-torch.expm1(log_p))).sum()  # as a loss: to be small

    return Margin()


def score_all(name: str, path: Path) -> dict[str, np.ndarray]:
    """Return scores (target, sample) of one checkpoint at every damping."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments

    subject = ALL[name]
    train, targets = (
        TensorDataset(*(torch.from_numpy(np.asarray(a)) for a in part)) for part in subject.data()
    )
    model = subject.build()
    model.load_state_dict(torch.load(path, weights_only=True))
    task = margin_task()
    model = prepare_model(model.eval(), task)
    with tempfile.TemporaryDirectory() as folder:
        analyzer = Analyzer(
            "ekfac", model, task, cpu=True, output_dir=folder, disable_tqdm=True,
            log_level=40,
        )  # fmt: skip
        analyzer.fit_all_factors(
            "factors", train, per_device_batch_size=128,
            factor_args=FactorArguments(strategy="ekfac"),
        )  # fmt: skip
        scores = {}
        for label, damping in DAMPINGS.items():
            analyzer.compute_pairwise_scores(
                label, "factors", targets, train, per_device_query_batch_size=128,
                per_device_train_batch_size=128,
                score_args=ScoreArguments(damping_factor=damping),
            )  # fmt: skip
            scores[label] = analyzer.load_pairwise_scores(label)["all_modules"].numpy()
    return scores


def measure(name: str, n: int, cache: Path) -> dict[str, Any]:
    subject, started = ALL[name], time.process_time()
    by_checkpoint = [score_all(name, path) for path in checkpoints(subject, cache, n)]
    row: dict[str, Any] = {"task": name, "checkpoints": n}
    for label in DAMPINGS:
        mean = np.mean([scores[label] for scores in by_checkpoint], 0)
        scores = xr.DataArray(mean.T, dims=("sample", "target"))
        row[label] = float(td.evaluate.lds(scores, *ground(subject), resamples=1).lds_mean)
    row["best"] = max(row[label] for label in DAMPINGS)
    row["CPU s per damping"] = (time.process_time() - started) / len(DAMPINGS)
    return row


def main() -> None:
    arguments = arguments_of(__doc__)
    tasks = TASKS if arguments.tasks == list(ALL) else arguments.tasks
    folder = arguments.cache / "kronfluence"
    folder.mkdir(parents=True, exist_ok=True)
    for n in N_CHECKPOINTS:
        print(f"\n{n} checkpoint{'s' * (n > 1)}: LDS of EK-FAC by kronfluence at each damping")
        for name in tasks:
            path = folder / f"{name}-{n}.json"
            if not path.exists():
                path.write_text(json.dumps(measure(name, n, arguments.cache)))
            row = json.loads(path.read_text())
            print(row["task"], {k: round(v, 3) for k, v in row.items() if isinstance(v, float)})


if __name__ == "__main__":
    main()
