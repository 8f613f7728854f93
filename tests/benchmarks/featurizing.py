"""CPU time of features, and which part of it is their projection, beside traker.

    python tests/benchmarks/featurizing.py

One micro-batch of a model in a fresh process: its per-sample gradients by hooks alone, the same
with their projection by SJLT and by Rademacher at proj_dim 2048 and by what ``td.fit`` makes (its
sketch for the model and 1,024 components; made-up numbers take the same time), the last product
alone, and traker's ``featurize``; of ViT-B/16 only the gradients, since the others take minutes per
image. All times are CPU seconds of one thread, which other programs on the machine change less than
seconds of the clock; every number is the smallest of all repeats of all processes, as other
programs can only add to it.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable

from _machine import in_a_process

PROJ_DIM, COMPONENTS = 2048, 1024
GRADIENTS, SPARSE, DENSE, TRAKER = "gradients alone", "with SJLT", "with Rademacher", "traker"
FITTED, PRODUCT = "with td.fit", "its last product alone"
OURS = (GRADIENTS, SPARSE, DENSE, FITTED, PRODUCT)
JOBS = {
    "cnn": (256, 9, (*OURS, TRAKER)),
    "resnet": (32, 2, (*OURS, TRAKER)),
    "gpt2": (4, 2, OURS),
    "vit": (4, 1, (GRADIENTS,)),
}
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
    runs = _by_trakdask(net, inputs, size, with_fit=FITTED in names)
    runs = {name: run for name, run in runs.items() if name in names}
    found: dict[str, list[float]] = {name: [] for name in runs}
    for name, run in runs.items():
        run()  # draws a random matrix, which a job keeps as long as it needs no other
        for _ in range(repeats):
            start = time.process_time()
            run()
            found[name].append((time.process_time() - start) / size)
    return found


def _by_trakdask(  # type: ignore[no-untyped-def]
    net, inputs, size: int, *, with_fit: bool
) -> dict[str, Callable[[], object]]:
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

    random = {
        GRADIENTS: lambda: gradients_to(lambda *gradient: None),
        SPARSE: lambda: features(SJLT(PROJ_DIM)),
        DENSE: lambda: features(Rademacher(PROJ_DIM)),
    }
    if not with_fit:
        return random
    maps = _fitted_maps(net)
    sketch = maps.components.new_ones(size, len(maps.components))

    def fitted_features() -> None:
        stream = maps.open(size)
        rotations = maps.rotations
        hooks_gradients(forward, ImageClassification(), batch, list(shapes), stream, rotations)
        stream.result()

    return random | {FITTED: fitted_features, PRODUCT: lambda: sketch @ maps.components}


def _fitted_maps(net):  # type: ignore[no-untyped-def]
    """Return the steps of a fit, as wide as for this model, with numbers that are made up."""
    import numpy as np
    import torch

    import trakdask as td
    from trakdask.fits.curvatures import kept_axes
    from trakdask.planning.fits import sketch_of
    from trakdask.projection import SJLT, RowMap
    from trakdask.projection.fitted import Components, Curvature, Fitted
    from trakdask.projection.maps import Maps
    from trakdask.tensors import LONGEST_BLOCK, factors_of

    model = td.Model(net, task="image_classification")
    shapes = {name: p.shape for name, p in net.named_parameters()}
    rng, n_rows = np.random.default_rng(0), sum(map(math.prod, shapes.values()))
    width = sketch_of(shapes).proj_dim
    step = Curvature(10.0, 0.5, width // 2, kept=kept_axes(model), block=LONGEST_BLOCK)
    factors = [*factors_of(shapes, step.turning)]
    arrays = {
        "curvature_eigenvectors": np.zeros(factors[-1][-1].stop, "f4"),
        "curvature_scale": rng.uniform(0.5, 2, n_rows).astype("f4"),
        "curvature_leading": np.sort(rng.choice(n_rows, width // 2, replace=False)),
        "principal_components": rng.standard_normal((width, COMPONENTS)).astype("f4"),
    }
    for *_, columns, place in factors:
        arrays["curvature_eigenvectors"][place] = np.eye(columns.stop - columns.start).ravel()
    steps = step, SJLT(width // 2), Components(COMPONENTS)
    rows = RowMap.from_shapes(shapes, alignment=SJLT.row_alignment)
    return Maps(Fitted(steps).bind(rows), rows, 7, arrays, torch.device("cpu"))


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


def compare(model: str, n: int, with_traker: bool) -> None:
    """Print a table of one model."""
    found: dict[str, list[float]] = {}
    for _ in range(n):
        for name, seconds in run(model, "trakdask").items():
            found.setdefault(name, []).extend(seconds)
    if with_traker and TRAKER in JOBS[model][2]:
        found |= run(model, TRAKER)
    times = {name: 1e6 * min(seconds) for name, seconds in found.items()}
    others = [name for name in (SPARSE, TRAKER) if name in times]
    print(
        f"\n{model}, micro-batch of {JOBS[model][0]}: CPU µs per sample; as multiples of {others}"
    )
    for name, time_of in times.items():
        ratios = "".join(f"{time_of / times[other]:10.3f}" for other in others)
        print(f"  {name:26}{time_of:10.0f}{ratios}", flush=True)


def main() -> None:
    """Compare with traker, model by model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--no-traker", action="store_true")
    parser.add_argument("--order", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.order:
        print(json.dumps(measure(*options.order)))
        return
    for model in options.models:
        compare(model, options.processes, with_traker=not options.no_traker)


if __name__ == "__main__":
    main()
