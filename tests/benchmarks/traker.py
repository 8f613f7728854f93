"""Featurize with the original TRAKer, with the drop-in in both modes, and with td.featurize.

One process per measurement, on one core, in turns; the median of this run. Prints samples per
second of the featurize loop for the CNN of ``trakdask.examples.digits_cnn`` (78k parameters), and
how often that is the original's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from typing import Any

from _machine import in_a_process, parser_of

ENGINES = {
    "traker 0.3.2, float16": ("trak", {}),
    "traker 0.3.2, float32": ("trak", {"use_half_precision": False}),
    'mode="traker", float16': ("trakdask.trak", {}),
    'mode="traker", float32': ("trakdask.trak", {"use_half_precision": False}),
    'mode="trakdask"': ("trakdask.trak", {"mode": "trakdask"}),
    "td.featurize": ("trakdask", {}),
}
PEERS = {
    **{name: name for name in ("traker 0.3.2, float16", "traker 0.3.2, float32")},
    'mode="traker", float16': "traker 0.3.2, float16",
    'mode="traker", float32': "traker 0.3.2, float32",
    'mode="trakdask"': "traker 0.3.2, float32",
    "td.featurize": "traker 0.3.2, float32",
}


def measure(engine: str, n: int, batch_size: int, proj_dim: int, core: int | None) -> list[float]:
    """Return the seconds, by the clock and of the CPU, of featurizing all batches but the first.

    What is made once per process, as the matrix that is kept, is made in the first.
    """
    import torch

    if core is not None:
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    from trakdask import examples

    model = examples.digits_cnn().eval()
    images, labels = torch.rand(n, 1, 8, 8), torch.randint(10, (n,))
    module, options = ENGINES[engine]
    if module == "trakdask":
        return of_featurize(model, images, labels, batch_size, proj_dim)
    traker_class = __import__(module, fromlist=["TRAKer"]).TRAKer
    with tempfile.TemporaryDirectory() as folder:
        traker = traker_class(
            model=model,
            task="image_classification",
            train_set_size=n,
            save_dir=folder,
            device="cpu",
            proj_dim=proj_dim,
            logging_level=100,
            **options,
        )
        traker.load_checkpoint(model.state_dict(), model_id=0)
        batches = list(zip(images.split(batch_size), labels.split(batch_size), strict=True))
        traker.featurize(batches[0], num_samples=batch_size)
        start = now()
        for batch in batches[1:]:
            traker.featurize(batch, num_samples=len(batch[0]))
        return since(start)


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def since(start: tuple[float, float]) -> list[float]:
    return [end - begin for begin, end in zip(start, now(), strict=True)]


def of_featurize(
    model: Any, images: Any, labels: Any, batch_size: int, proj_dim: int
) -> list[float]:
    """Measure td.featurize on the same samples, after those of the first batch."""
    import dask

    import trakdask as td

    described = td.Model(model, task="image_classification", checkpoint_ids=[0])
    projector = td.Rademacher(proj_dim=proj_dim)

    def compute(rows: slice) -> list[float]:
        given = {"image": images[rows].numpy()}, {"label": labels[rows].numpy()}
        samples = td.from_arrays(given[0], coords=given[1], chunks=len(images))
        features = td.featurize(
            samples, described, projector=projector, batch_size=batch_size, device="cpu"
        )
        start = now()
        with dask.config.set(scheduler="synchronous"):
            features.compute()
        return since(start)

    compute(slice(0, batch_size))
    return compute(slice(batch_size, None))


def run(engine: str, options: argparse.Namespace) -> list[float]:
    core = max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    order = [engine, options.n_samples, options.batch_size, options.proj_dim, core]
    # Numba is imported in the first batch, which is not timed.
    return list(in_a_process(__file__, "--order", json.dumps(order), TRAKDASK_NUMBA="1"))


def report(seconds: dict[str, list[list[float]]], options: argparse.Namespace) -> None:
    print(
        f"digits_cnn, p = {options.proj_dim}, batches of {options.batch_size}, "
        f"{options.n_samples} samples, {options.repeats} repeats in turns\n"
    )
    print(f"{'':24}{'samples/s':>10}{'spread':>8}{'per CPU s':>11}   by CPU time")
    n = options.n_samples - options.batch_size
    for engine, found in seconds.items():
        wall, spent = zip(*found, strict=True)
        beside = f"{ratio(seconds, engine, PEERS[engine]):.2f} x {PEERS[engine]}"
        print(
            f"{engine:24}{n / statistics.median(wall):10.0f}{max(wall) / min(wall):8.2f}"
            f"{n / statistics.median(spent):11.0f}   {beside if engine != PEERS[engine] else ''}"
        )
    share = ratio(seconds, 'mode="trakdask"', "td.featurize")
    print(f'\nmode="trakdask" is {share:.2f} x td.featurize, by CPU time')


def ratio(seconds: dict[str, list[list[float]]], engine: str, peer: str) -> float:
    """Return the median over the repeats of how much faster an engine is, by CPU time."""
    pairs = zip(seconds[engine], seconds[peer], strict=True)
    return statistics.median(theirs[1] / mine[1] for mine, theirs in pairs)


def main() -> None:
    parser = parser_of(__doc__, n_samples=512, batch_size=32, proj_dim=2048, repeats=5)
    parser.add_argument("--order", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.order:
        print(json.dumps(measure(*options.order)))
        return
    seconds: dict[str, list[list[float]]] = {engine: [] for engine in ENGINES}
    for _ in range(options.repeats):
        for engine, found in seconds.items():
            found.append(run(engine, options))
    report(seconds, options)


if __name__ == "__main__":
    main()
