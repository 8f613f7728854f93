"""CPU time of features, and which part of it is their projection, beside traker.

    python tests/benchmarks/featurizing.py

One micro-batch of a model in a fresh process: its per-sample gradients by hooks alone, the same
with their projection by SJLT and by Rademacher at proj_dim 2048, and traker's ``featurize``; of
ViT-B/16 only the gradients, since the others take minutes per image. All times are CPU seconds of
one thread, which other programs on the machine change less than seconds of the clock; every number
is the median of all repeats of all processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable

from _machine import in_a_process

PROJ_DIM = 2048
GRADIENTS, SPARSE, DENSE, TRAKER = "gradients alone", "with SJLT", "with Rademacher", "traker"
ALL = (GRADIENTS, SPARSE, DENSE, TRAKER)
JOBS = {"cnn": (128, 9, ALL), "resnet": (32, 2, ALL), "vit": (4, 1, (GRADIENTS,))}
"""Micro-batch, repeats, and what is run, of each model of ``_models.py``."""


def measure(model: str, engine: str) -> dict[str, list[float]]:
    """Return CPU seconds per sample of every repeat, by what was run."""
    import torch
    from _models import SUBJECTS

    torch.set_num_threads(1)
    torch.manual_seed(0)
    size, repeats, names = JOBS[model]
    subject = SUBJECTS[model]
    inputs, net = subject.inputs(size), subject.build().eval()
    if engine == TRAKER:
        return {TRAKER: _by_traker(net, inputs, size)}
    runs = {n: run for n, run in _by_trakdask(net, inputs, size).items() if n in names}
    for run in runs.values():
        run()
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.process_time()
            run()
            found[name].append((time.process_time() - start) / size)
    return found


def _by_trakdask(net, inputs, size: int) -> dict[str, Callable[[], object]]:  # type: ignore[no-untyped-def]
    from trakdask.models.gradients import hooks_gradients
    from trakdask.models.tasks import Batch, Forward, ImageClassification
    from trakdask.projection import SJLT, ProjectionStream, Projector, Rademacher, RowMap

    parameters = {name: p.detach() for name, p in net.named_parameters()}
    forward, batch = Forward(net, parameters, dict(net.named_buffers())), Batch(inputs)
    shapes = {name: p.shape for name, p in parameters.items()}

    def gradients_to(sink: Callable[..., None]) -> None:
        hooks_gradients(forward, ImageClassification(), batch, list(shapes), sink)

    def features(projector: Projector) -> None:
        rows = RowMap.from_shapes(shapes, alignment=projector.row_alignment)
        stream = ProjectionStream(projector, rows, size, checkpoint=7)
        gradients_to(stream if callable(stream) else stream.add)
        stream.result()

    return {
        GRADIENTS: lambda: gradients_to(lambda *gradient: None),
        SPARSE: lambda: features(SJLT(PROJ_DIM)),
        DENSE: lambda: features(Rademacher(PROJ_DIM)),
    }


def _by_traker(net, inputs, size: int) -> list[float]:  # type: ignore[no-untyped-def]
    from trak import TRAKer

    with tempfile.TemporaryDirectory() as folder:
        traker = TRAKer(
            model=net, task="image_classification", train_set_size=2 * size, save_dir=folder,
            device="cpu", proj_dim=PROJ_DIM, use_half_precision=False, logging_level=40,
        )  # fmt: skip
        traker.load_checkpoint(net.state_dict(), model_id=0)
        seconds = []
        for _ in range(2):  # the first micro-batch takes twice as long as those after it
            start = time.process_time()
            traker.featurize([inputs["image"], inputs["label"]], num_samples=size)
            seconds.append((time.process_time() - start) / size)
        return seconds[1:]


def run(model: str, engine: str) -> dict[str, list[float]]:
    """Measure in a fresh process."""
    found: dict[str, list[float]] = in_a_process(
        __file__, "--order", model, engine, TRAKDASK_NUMBA="1"
    )
    return found


def compare(model: str, n: int) -> None:
    """Print a table of one model."""
    found: dict[str, list[float]] = {}
    for _ in range(n):
        for name, seconds in run(model, "trakdask").items():
            found.setdefault(name, []).extend(seconds)
    traker = run(model, TRAKER)[TRAKER][0] if TRAKER in JOBS[model][2] else None
    print(f"\n{model}, micro-batch of {JOBS[model][0]}: CPU µs per sample, times traker")
    for name, seconds in found.items():
        median = statistics.median(seconds)
        ratio = "" if name == GRADIENTS or not traker else f"{traker / median:8.1f}"
        print(f"  {name:26}{1e6 * median:10.0f}{ratio}", flush=True)
    if traker:
        print(f"  {TRAKER:26}{1e6 * traker:10.0f}", flush=True)


def main() -> None:
    """Compare with traker, model by model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--order", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.order:
        print(json.dumps(measure(*options.order)))
        return
    for model in options.models:
        compare(model, options.processes)


if __name__ == "__main__":
    main()
