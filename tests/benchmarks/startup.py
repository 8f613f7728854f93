"""What a process pays before it computes anything: the first and the second ``save`` of 16 samples.

    python tests/benchmarks/startup.py

Each step is measured in fresh processes, in CPU seconds of the process, which other programs on the
machine change little, and in seconds of the clock. The machine code of numba is on disk already.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise

N_PROCESSES = 5
STEPS = ("import torch", "import trakdask, samples, model", "first save", "second save")


def measure() -> None:
    """Print the CPU and wall seconds of each step as JSON."""
    times = [(time.process_time(), time.perf_counter())]

    def lap() -> None:
        times.append((time.process_time(), time.perf_counter()))

    import torch

    lap()
    import numpy as np

    import trakdask as td

    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 10)
    )
    image = np.random.default_rng(0).normal(size=(16, 1, 8, 8)).astype("f4")
    samples = td.from_arrays({"image": image, "label": np.arange(16) % 10})
    model = td.Model(net, [net.state_dict()], task="image_classification")
    lap()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first", "second"):
            features = td.featurize(samples, model, projector=td.SJLT(proj_dim=512, seed=0))
            td.save(features, f"{folder}/{name}.zarr", progress=False)
            lap()
    spent = [
        [after - before for before, after in zip(one, other, strict=True)]
        for one, other in pairwise(times)
    ]
    print(json.dumps(spent))


def main() -> None:
    """Run the processes one after another and print medians."""
    runs = [
        json.loads(
            subprocess.run(
                [sys.executable, __file__, "measure"], capture_output=True, text=True, check=True
            ).stdout
        )
        for _ in range(N_PROCESSES)
    ]
    print(f"{'median of ' + str(N_PROCESSES) + ' processes':32} {'CPU s':>8} {'wall s':>8}")
    for i, step in enumerate(STEPS):
        cpu, wall = (statistics.median(run[i][j] for run in runs) for j in (0, 1))
        print(f"{step:32} {cpu:8.2f} {wall:8.2f}")


if __name__ == "__main__":
    measure() if sys.argv[1:] == ["measure"] else main()
