"""How exact are inner products of projected gradients? Signs in every column, or in a few.

    python tests/benchmarks/projectors.py [--seeds 10] [--gradients dense embedding ...]

For every pair of gradients g and h, the error of φ(g)·φ(h) as an estimate of g·h, divided by
‖g‖‖h‖ √((1 + cos²(g, h)) / proj_dim): no projector here has a larger standard deviation. So the
root mean square (rms) is at most 1, up to chance; the 99.9 % quantile and the worst say how far the
tails reach; `--seeds 0` leaves them out. Effective columns tell whether few elements dominate.
Pairs include g = h, whose product is the squared length. Random matrices are drawn
anew for every seed; the gradients are the same for all of them.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

import dask
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import trakdask as td
from trakdask import examples
from trakdask.projection import SJLT, Projector, Rademacher, RowMap, project

N_ROWS, N_GRADIENTS = 20_000, 64
PROJ_DIMS = (256, 512, 1024, 2048, 4096, 8192)
SPARSITIES = (1, 2, 4, 8)

Errors = NDArray[np.float64]


# --- gradients ------------------------------------------------------------------------------------


def dense() -> Tensor:
    """Normal numbers, with a part that all gradients have in common."""
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((N_GRADIENTS, N_ROWS))
    return torch.from_numpy(noise + 0.5 * rng.standard_normal(N_ROWS)).float()


def embedding() -> Tensor:
    """12 of 400 rows of an embedding; some words are in most texts, most words in few."""
    rng = np.random.default_rng(1)
    frequency = 1 / np.arange(1, 401)
    gradients = np.zeros((N_GRADIENTS, 400, N_ROWS // 400))
    for gradient in gradients:
        words = rng.choice(400, 12, replace=False, p=frequency / frequency.sum())
        gradient[words] = rng.standard_normal((12, gradient.shape[1]))
    return torch.from_numpy(gradients).flatten(1).float()


def dominated() -> Tensor:
    """Four elements with nine tenths of the squared length, the same in all gradients."""
    rng = np.random.default_rng(2)
    gradients = rng.standard_normal((16, 1000))
    gradients[:, rng.choice(1000, 4, replace=False)] *= np.sqrt(9 * 1000 / 4)
    return torch.from_numpy(gradients).float()


def network() -> Tensor:
    """Gradients of a trained perceptron on handwritten digits: most of them zero, by ReLU."""
    (images, labels), (targets, target_labels) = examples.digits_arrays()
    state = examples.train_classifier(examples.digits_mlp, images, labels, seed=0)
    samples = td.from_arrays(
        {"image": targets[:N_GRADIENTS]}, coords={"label": target_labels[:N_GRADIENTS]}
    )
    model = td.Model(examples.digits_mlp, [state])
    features = td.featurize(samples, model, projector=td.Identity()).feature
    return torch.from_numpy(features.values[:, :, 0])


GRADIENTS: dict[str, Callable[[], Tensor]] = {
    "dense": dense,
    "embedding": embedding,
    "dominated": dominated,
    "network": network,
}
#: Errors that come from few pairs of elements are rare, so more matrices are needed to see them.
SEEDS_PER_SEED = {"dominated": 40}


# --- errors ---------------------------------------------------------------------------------------


def errors(gradients: Tensor, features: Tensor) -> Errors:
    """Return the error of every pair's product in units of its bound."""
    g, phi = (x.double().numpy() for x in (gradients, features))
    products, found = g @ g.T, phi @ phi.T
    squared = np.diag(products)
    bound = np.sqrt((np.outer(squared, squared) + products**2) / phi.shape[1])
    return ((found - products) / bound)[np.triu_indices(len(g))]


def features_of(gradients: Tensor, projector: Projector) -> Tensor:
    rows = RowMap.from_shapes({"g": (gradients.shape[1],)}, alignment=projector.row_alignment)
    return project(projector, {"g": gradients}, rows, 0)


def of_signs(gradients: Tensor, seed: int) -> dict[int, Errors]:
    """Return the errors of ``Rademacher``: a smaller matrix is a part of a larger one."""
    widest = max(PROJ_DIMS)
    features = features_of(gradients, Rademacher(widest, seed=seed))
    return {p: errors(gradients, features[:, :p] * (widest / p) ** 0.5) for p in PROJ_DIMS}


def of_sparse_signs(gradients: Tensor, seed: int, sparsity: int) -> dict[int, Errors]:
    made = functools.partial(SJLT, sparsity=sparsity, seed=seed)
    return {p: errors(gradients, features_of(gradients, made(p))) for p in PROJ_DIMS}


PROJECTORS: dict[str, Callable[[Tensor, int], dict[int, Errors]]] = {"Rademacher": of_signs} | {
    f"SJLT, s = {s}": functools.partial(of_sparse_signs, sparsity=s) for s in SPARSITIES
}


# --- tables ---------------------------------------------------------------------------------------


def table(gradients: Tensor, n_seeds: int) -> str:
    """Return the errors of every projector and proj_dim, over seeds and pairs."""
    lines = [f"{'proj_dim':>8}" + "".join(f"{name:>22}" for name in PROJECTORS)]
    lines.append(" " * 8 + f"{'rms':>9}{'99.9 %':>7}{'worst':>6}" * len(PROJECTORS))
    found = {
        name: [errors_of(gradients, seed) for seed in range(n_seeds)]
        for name, errors_of in PROJECTORS.items()
    }
    for p in PROJ_DIMS:
        each = (np.concatenate([of[p] for of in seeds]) for seeds in found.values())
        lines.append(f"{p:>8}" + "".join(cell(np.abs(all_errors)) for all_errors in each))
    return "\n".join(lines)


def cell(sizes: Errors) -> str:
    rms = np.sqrt((sizes**2).mean())
    return f"{rms:>9.2f}{np.quantile(sizes, 0.999):>7.1f}{sizes.max():>6.0f}"


def effective_columns(features: Tensor) -> float:
    """Return how many columns share the squared length of all features, (Σ d)² / Σ d².

    d is the diagonal of their gram matrix. A few, if a few elements dominate every gradient and
    each has signs in a few columns only.
    """
    diagonal = features.double().square().sum(0)
    return float(diagonal.sum() ** 2 / diagonal.square().sum())


def columns(gradients: Tensor, p: int = 2048) -> str:
    made = {"Rademacher": Rademacher(p)} | {f"SJLT, s = {s}": SJLT(p, s) for s in SPARSITIES}
    found = {name: effective_columns(features_of(gradients, each)) for name, each in made.items()}
    return ", ".join(f"{name} {number:.0f}" for name, number in found.items())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--gradients", nargs="+", choices=list(GRADIENTS), default=list(GRADIENTS))
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with dask.config.set(scheduler="synchronous"):
        for name in options.gradients:
            gradients = GRADIENTS[name]()
            n, rows = gradients.shape
            about = str(GRADIENTS[name].__doc__)
            pairs = n * (n + 1) // 2
            n_seeds = options.seeds * SEEDS_PER_SEED.get(name, 1)
            print(f"\n{name}: {about}")
            print(f"effective columns of 2048: {columns(gradients)}", flush=True)
            if n_seeds:
                print(f"{n} gradients of {rows} elements, {pairs} pairs, {n_seeds} random matrices")
                print(table(gradients, n_seeds), flush=True)


if __name__ == "__main__":
    main()
