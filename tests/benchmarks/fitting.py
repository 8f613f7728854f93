"""CPU seconds of a fit of 2,000 samples by its passes, beside features of the same samples.

    python tests/benchmarks/fitting.py

One checkpoint of a classifier with random weights, in a fresh process with one thread. Features of
the samples come with the fit. `sjlt` are features by ``td.SJLT(2048)`` instead, of 256 samples.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter

from _machine import in_a_process, parser_of

MODELS = {"cnn": 2000, "resnet": 2000, "resnet18": 2000}
PASSES = {
    "axis-products": "axes of the curvature", "squares": "its eigenvalues",
    "two-sketches": "asking", "_principal": "components and features",
}  # fmt: skip


def measure(name: str) -> dict[str, float]:
    """Return CPU seconds of the whole fit, of its passes, and of random columns per sample."""
    import dask
    import torch
    from _models import SUBJECTS
    from dask.callbacks import Callback

    import trakdask as td

    torch.set_num_threads(1)
    torch.manual_seed(0)
    n, subject = MODELS[name], SUBJECTS[name]
    arrays = {key: value.numpy() for key, value in subject.inputs(n).items()}
    samples = td.from_arrays(arrays, chunks=250)
    model = td.Model(subject.build(), task="image_classification")
    took: Counter[str] = Counter()
    starts: dict[object, float] = {}

    def start(key, *_):  # type: ignore[no-untyped-def]
        starts[key] = time.process_time()

    def stop(key, *_):  # type: ignore[no-untyped-def]
        text = str(key)
        known = [title for part, title in PASSES.items() if part in text]
        took[known[0] if known else "gradients and others"] += time.process_time() - starts[key]

    with dask.config.set(scheduler="synchronous"):
        before = time.process_time()
        with Callback(pretask=start, posttask=stop):
            td.fit(samples, model, progress=False)
        whole = time.process_time() - before
        few = samples.isel(sample=slice(256))
        before = time.process_time()
        td.featurize(few, model, td.SJLT(2048)).compute()
        sjlt = n * (time.process_time() - before) / 256
    return {"whole fit": whole, **took, "features by SJLT(2048)": sjlt}


def main() -> None:
    options = parser_of(__doc__, models=list(MODELS)).parse_args()
    for name in options.models:
        found = in_a_process(__file__, "--order", name, TRAKDASK_NUMBA="1")
        print(f"\n{name}, {MODELS[name]:,} samples: CPU seconds")
        for what, seconds in found.items():
            print(f"  {what:28}{seconds:8.1f}", flush=True)


if __name__ == "__main__":
    if "--order" in sys.argv:
        print(json.dumps(measure(sys.argv[-1])))
    else:
        main()
