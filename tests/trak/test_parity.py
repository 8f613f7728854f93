"""The drop-in beside the original: runs, projectors, score computers, helpers, signatures.

The oracle is the package ``traker`` 0.3.2 itself.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trak._models import MODELS, built
from tests.trak._runs import Run, content, relative
from trakdask import trak as ours
from trakdask.trak import projectors
from trakdask.trak.savers import EXTRA

trak = pytest.importorskip("trak")

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

MODULES = ("traker", "gradient_computers", "modelout_functions", "projectors", "savers",
           "score_computers", "utils")  # fmt: skip
PROJECTORS = ("default", "normal", "rademacher", "single", "noop")


def projector(module: Any, kind: str, model: str) -> Any:
    if kind == "default":
        return None
    if kind == "noop":
        return module.NoOpProjector(device="cpu")
    proj_type = "rademacher" if kind == "rademacher" else "normal"
    name = "BasicSingleBlockProjector" if kind == "single" else "BasicProjector"
    width = sum(parameter.numel() for parameter in built(model).parameters())
    return getattr(module, name)(width, 12, 3, proj_type, "cpu", block_size=5)


def both(run: Run, folder: Path, kind: str = "default") -> tuple[np.ndarray, np.ndarray]:
    expected = run.whole(
        trak.TRAKer, folder / "old", projector=projector(trak.projectors, kind, run.model)
    )
    found = run.whole(ours.TRAKer, folder / "new", projector=projector(projectors, kind, run.model))
    return found, expected


def require_same_files(folder: Path, tolerance: float) -> None:
    found, expected = (content(folder / name) for name in ("new", "old"))
    assert sorted(found) == sorted(expected)
    found["metadata.json"].pop(EXTRA)
    for files in (found, expected):
        for experiment in files["experiments.json"].values():
            del experiment["scores_path"]
    for name, value in expected.items():
        if isinstance(value, np.ndarray):
            assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype)
            assert relative(found[name], value) < tolerance, name
        else:
            assert found[name] == value


@pytest.mark.parametrize(
    ("kind", "model", "lambda_reg", "half"),
    [
        *(("default", model, 0.05, False) for model in MODELS),
        *((kind, "normed", 0.05, False) for kind in PROJECTORS if kind != "default"),
        ("default", "mlp", 0.0, False),
        *((kind, "normed", 2.0, True) for kind in ("default", "single", "noop")),
    ],
)
def test_run__scores_and_files(
    tmp_path: Path, kind: str, model: str, lambda_reg: float, half: bool
) -> None:
    options = {"use_half_precision": half, "lambda_reg": lambda_reg}
    by_inds = kind == "default" and lambda_reg < 1
    found, expected = both(Run(model, 2, by_inds, options), tmp_path, kind)
    dtype, tolerance = (np.float16, 2e-2) if half else (np.float32, 1e-5)
    assert found.dtype == expected.dtype == dtype
    assert relative(found, expected) < tolerance
    require_same_files(tmp_path, tolerance)


@pytest.mark.parametrize(
    ("options", "computer"),
    [
        ({"grad_wrt": ["1.weight"], "proj_dim": 4}, "FunctionalGradientComputer"),
        ({"grad_wrt": ["3.bias", "1.bias"], "projector_seed": 5}, "FunctionalGradientComputer"),
        ({"task": "iterative_image_classification"}, "IterativeGradientComputer"),
    ],
)
def test_run__options(tmp_path: Path, options: dict[str, Any], computer: str) -> None:
    run = Run(options={"lambda_reg": 0.1, "use_half_precision": False, **options})
    found, expected = (
        run.whole(
            package.TRAKer,
            tmp_path / package.__name__,
            gradient_computer=getattr(package.gradient_computers, computer),
        )
        for package in (ours, trak)
    )
    assert relative(found, expected) < 1e-5


@pytest.mark.parametrize("half", [False, True])
def test_run__with_classes_of_the_original(tmp_path: Path, half: bool) -> None:
    run = Run(n_checkpoints=2, options={"lambda_reg": 0.5, "use_half_precision": half})
    expected = run.whole(trak.TRAKer, tmp_path / "old")
    found = run.whole(
        ours.TRAKer,
        tmp_path / "new",
        gradient_computer=trak.gradient_computers.FunctionalGradientComputer,
        saver=trak.savers.MmapSaver,
        score_computer=trak.score_computers.BasicScoreComputer,
        task=trak.modelout_functions.ImageClassificationModelOutput(),
    )
    assert relative(found, expected) < (2e-2 if half else 1e-6)


GRADIENTS = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["BasicProjector", "BasicSingleBlockProjector"])
@pytest.mark.parametrize("proj_type", ["normal", "rademacher"])
@pytest.mark.parametrize(
    ("dtype", "is_kept"), [(torch.float32, False), (torch.float16, True), (torch.float64, True)]
)
def test_projector__same_matrix_and_product(
    name: str, proj_type: str, dtype: torch.dtype, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projectors, "_fits", lambda n_bytes, device: is_kept)
    as_dict = {"a": GRADIENTS[:, :39].reshape(3, 13, 3), "b": GRADIENTS[:, 39]}
    for proj_dim, seed in ((6, 7), (20, 11)):
        old, new = (
            getattr(m, name)(40, proj_dim, seed, proj_type, "cpu", block_size=6, dtype=dtype)
            for m in (trak.projectors, projectors)
        )
        assert torch.equal(new.proj_matrix, old.proj_matrix)
        for grads, model_id in ((GRADIENTS, 0), (as_dict, 0), (as_dict, 13), (GRADIENTS, 0)):
            new.free_memory()  # after which the original has lost a matrix of one block (quirk 3)
            expected = old.project(grads, model_id=model_id)
            found = new.project(grads, model_id=model_id)
            assert found.dtype == expected.dtype
            assert relative(found, expected) < (3e-3 if dtype == torch.float16 else 1e-6)
        if name == "BasicProjector":
            assert (new.seeds, new.num_blocks) == (old.seeds, old.num_blocks)
            assert new.jl_size == old.jl_size


def functions_of(module: Any, like: Any) -> Iterator[tuple[str, Any]]:
    """Yield functions and public methods of a module, by the names that another one has."""
    for name, member in vars(like).items():
        if getattr(member, "__module__", None) != like.__name__:
            continue
        if inspect.isfunction(member):
            yield name, getattr(module, name)
        elif inspect.isclass(member):
            for method in vars(member):
                is_public = method == "__init__" or not method.startswith("_")
                if is_public and inspect.isfunction(getattr(member, method)):
                    yield f"{name}.{method}", getattr(getattr(module, name), method)


@pytest.mark.parametrize("name", MODULES)
def test_signatures__same_names_order_and_defaults(name: str) -> None:
    def described(function: Any) -> list[tuple[str, Any, Any]]:
        parameters = inspect.signature(function).parameters.values()
        return [
            (p.name, p.kind, getattr(p.default, "__name__", p.default))
            for p in parameters
            if p.kind is not p.KEYWORD_ONLY
        ]

    old, new = (
        importlib.import_module(f"{package}.{name}") for package in ("trak", "trakdask.trak")
    )
    found, expected = (
        {name: described(function) for name, function in functions_of(module, like=old)}
        for module in (new, old)
    )
    assert found == expected
