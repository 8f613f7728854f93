"""The drop-in beside the original: runs, projectors, score computers, helpers, signatures.

The oracle is the package ``traker`` 0.3.2 itself.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trak._models import MODELS, built
from tests.trak._runs import Run, content, relative
from trakdask import trak as ours
from trakdask.trak import (
    gradient_computers,
    modelout_functions,
    projectors,
    savers,
    score_computers,
    traker,
    utils,
)
from trakdask.trak.savers import EXTRA

trak = pytest.importorskip("trak")
from trak import gradient_computers as old_gradient_computers  # noqa: E402
from trak import modelout_functions as old_modelout_functions  # noqa: E402
from trak import projectors as old_projectors  # noqa: E402
from trak import savers as old_savers  # noqa: E402
from trak import score_computers as old_computers  # noqa: E402
from trak import traker as old_traker  # noqa: E402
from trak import utils as old_utils  # noqa: E402

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

PROJECTORS = ("default", "normal", "rademacher", "single", "noop")


def width(model: str) -> int:
    return sum(parameter.numel() for parameter in built(model).parameters())


def projector(module: Any, kind: str, model: str) -> Any:
    if kind == "default":
        return None
    if kind == "noop":
        return module.NoOpProjector(device="cpu")
    proj_type = "rademacher" if kind == "rademacher" else "normal"
    name = "BasicSingleBlockProjector" if kind == "single" else "BasicProjector"
    return getattr(module, name)(width(model), 12, 3, proj_type, "cpu", block_size=5)


def both(run: Run, folder: Path, kind: str = "default") -> tuple[np.ndarray, np.ndarray]:
    expected = run.whole(
        trak.TRAKer, folder / "old", projector=projector(old_projectors, kind, run.model)
    )
    found = run.whole(ours.TRAKer, folder / "new", projector=projector(projectors, kind, run.model))
    return found, expected


def require_same_files(folder: Path, tolerance: float) -> None:
    found, expected = (content(folder / name) for name in ("new", "old"))
    assert sorted(found) == sorted(expected)
    found["metadata.json"].pop(EXTRA)
    for each in (found, expected):
        for experiment in each["experiments.json"].values():
            del experiment["scores_path"]
    for name, value in expected.items():
        if isinstance(value, np.ndarray):
            assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype)
            assert relative(found[name], value) < tolerance, name
        else:
            assert found[name] == value


@pytest.mark.parametrize(
    ("kind", "model", "n_checkpoints", "by_inds", "lambda_reg"),
    [
        *(("default", model, 2, True, 0.05) for model in MODELS),
        *((kind, "normed", 3, False, 0.05) for kind in PROJECTORS),
        *(("default", model, 1, False, 0.0) for model in ("linear", "mlp")),
    ],
)
def test_run__float32_scores_and_files(
    tmp_path: Path, kind: str, model: str, n_checkpoints: int, by_inds: bool, lambda_reg: float
) -> None:
    options = {"use_half_precision": False, "lambda_reg": lambda_reg}
    found, expected = both(Run(model, n_checkpoints, by_inds, options), tmp_path, kind)
    assert found.dtype == expected.dtype == np.float32
    assert relative(found, expected) < 1e-5
    require_same_files(tmp_path, 1e-5)


@pytest.mark.parametrize("kind", PROJECTORS)
def test_run__float16_scores_and_files(tmp_path: Path, kind: str) -> None:
    run = Run("normed", n_checkpoints=2, options={"lambda_reg": 2.0})
    found, expected = both(run, tmp_path, kind)
    assert found.dtype == expected.dtype == np.float16
    assert relative(found, expected) < 2e-2
    require_same_files(tmp_path, 2e-2)


ITERATIVE = {"task": "iterative_image_classification"}


@pytest.mark.parametrize(
    "options",
    [
        {"grad_wrt": ["1.weight"], "proj_dim": 4},
        {"grad_wrt": ["3.bias", "1.bias"], "projector_seed": 5},
        ITERATIVE,
    ],
)
def test_run__options(tmp_path: Path, options: dict[str, Any]) -> None:
    run = Run(options={"lambda_reg": 0.1, "use_half_precision": False, **options})
    of_each = (ours.TRAKer, "new", gradient_computers), (trak.TRAKer, "old", old_gradient_computers)
    kind = "IterativeGradientComputer" if options is ITERATIVE else "FunctionalGradientComputer"
    found, expected = (
        run.whole(traker_class, tmp_path / name, gradient_computer=getattr(module, kind))
        for traker_class, name, module in of_each
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
        saver=old_savers.MmapSaver,
        score_computer=old_computers.BasicScoreComputer,
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
            for m in (old_projectors, projectors)
        )
        assert torch.equal(new.proj_matrix, old.proj_matrix)
        for grads, model_id in ((GRADIENTS, 0), (as_dict, 0), (as_dict, 13), (GRADIENTS, 0)):
            expected = old.project(grads, model_id=model_id)
            found = new.project(grads, model_id=model_id)
            assert found.dtype == expected.dtype
            assert relative(found, expected) < (3e-3 if dtype == torch.float16 else 1e-6)
        if name == "BasicProjector":
            assert (new.seeds, new.num_blocks) == (old.seeds, old.num_blocks)
            assert new.jl_size == old.jl_size


MODULES = [
    (gradient_computers, old_gradient_computers),
    (modelout_functions, old_modelout_functions),
    (projectors, old_projectors),
    (savers, old_savers),
    (score_computers, old_computers),
    (traker, old_traker),
    (utils, old_utils),
]


def signatures() -> list[tuple[str, Any, Any]]:
    found = []
    for new, old in MODULES:
        for name, member in vars(old).items():
            if getattr(member, "__module__", None) != old.__name__:
                continue
            if inspect.isfunction(member):
                found.append((name, getattr(new, name), member))
            elif inspect.isclass(member):
                methods = [m for m in vars(member) if inspect.isfunction(getattr(member, m))]
                found += [
                    (f"{name}.{m}", getattr(getattr(new, name), m), getattr(member, m))
                    for m in methods
                    if not (m.startswith("_") and m != "__init__")
                ]
    return found


def test_signatures__same_names_order_and_defaults() -> None:
    def described(function: Any) -> list[tuple[str, Any, Any]]:
        parameters = inspect.signature(function).parameters.values()
        return [
            (p.name, p.kind, getattr(p.default, "__name__", p.default))
            for p in parameters
            if p.kind is not p.KEYWORD_ONLY
        ]

    assert {name: described(new) for name, new, _ in signatures()} == {
        name: described(old) for name, _, old in signatures()
    }
