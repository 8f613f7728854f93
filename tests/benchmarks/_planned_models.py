"""Models of which a plan predicts the memory, and the processes that plan or save features."""

from __future__ import annotations

import tempfile

import dask
import numpy as np
import torch
from _machine import peak_memory
from torch import nn

import trakdask as td


class Logits(nn.Module):
    """A model of transformers with random weights, whose logits are its output."""

    def __init__(self, kind: str, head: str, **options: int) -> None:
        super().__init__()
        import transformers  # not of the extras that all benchmarks need

        config = getattr(transformers, f"{kind}Config")(**options, attn_implementation="eager")
        self.model = getattr(transformers, f"{kind}{head}")(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).logits


def cnn() -> nn.Module:
    convolutions = nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1)
    return nn.Sequential(
        *convolutions, nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(4096, 9)
    )


PHOTO = (3, 224, 224)
IMAGES = "ForImageClassification"
MODELS = {  # how it is built, the shape of a sample, and samples per block
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 9)),
        (64,),
        512,
    ),
    "CNN": (cnn, (3, 32, 32), 128),
    "ResNet-50": (lambda: Logits("ResNet", IMAGES, num_labels=1000), PHOTO, 8),
    "ViT-B/16": (lambda: Logits("ViT", IMAGES, num_labels=1000), PHOTO, 4),
    "GPT-2": (lambda: Logits("GPT2", "LMHeadModel").model, (128,), 4),
}


def planned_or_saved(name: str, stage: str) -> list[int] | int:
    build, shape, block = MODELS[name]
    n, rng = 2 * block, np.random.default_rng(0)
    torch.manual_seed(0)
    if name == "GPT-2":
        task, data = "causal_lm", {"input_ids": rng.integers(0, 50_000, (n, *shape))}
        data["attention_mask"] = np.ones_like(data["input_ids"])
    else:
        task, data = "image_classification", {"image": rng.random((n, *shape), np.float32)}
        data["label"] = np.arange(n) % 9
    model = td.Model(build, [build().state_dict()], task=task)
    features = td.featurize(td.from_arrays(data, chunks=block), model)
    if stage == "plan":
        plan = td.plan(features, pilot=True)
        return [plan.memory_bytes(threads) for threads in (1, 2)]
    with tempfile.TemporaryDirectory() as folder:
        with dask.config.set(scheduler="threads", num_workers=int(stage)):
            td.save(features, f"{folder}/train.zarr", progress=False)
        return peak_memory()
