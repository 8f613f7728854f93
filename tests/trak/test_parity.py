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

from tests.trak._runs import MODELS, Run, built, content, relative
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


@pytest.fixture(autouse=True)
def _matrices_of_the_original_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its matrices of one block are lost in finalize_features, so that scoring fails (quirk 3)."""
    for name in ("BasicProjector", "BasicSingleBlockProjector"):
        monkeypatch.setattr(getattr(old_projectors, name), "free_memory", lambda self: None)


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


@pytest.mark.parametrize("kind", PROJECTORS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("n_checkpoints", "by_inds"), [(1, False), (2, True), (3, False)])
def test_run__float32_scores_and_files(
    tmp_path: Path, kind: str, model: str, n_checkpoints: int, by_inds: bool
) -> None:
    options = {"use_half_precision": False, "lambda_reg": 0.05}
    found, expected = both(Run(model, n_checkpoints, by_inds, options), tmp_path, kind)
    assert found.dtype == expected.dtype == np.float32
    assert relative(found, expected) < 1e-5
    require_same_files(tmp_path, 1e-5)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ["default", "normal", "single"])
def test_run__float32_without_lambda(tmp_path: Path, model: str, kind: str) -> None:
    found, expected = both(Run(model, options={"use_half_precision": False}), tmp_path, kind)
    assert relative(found, expected) < 1e-5


@pytest.mark.parametrize("kind", PROJECTORS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("n_checkpoints", [1, 2])
def test_run__float16_scores_and_files(
    tmp_path: Path, kind: str, model: str, n_checkpoints: int
) -> None:
    run = Run(model, n_checkpoints, options={"lambda_reg": 2.0})
    found, expected = both(run, tmp_path, kind)
    assert found.dtype == expected.dtype == np.float16
    assert relative(found, expected) < 2e-2
    require_same_files(tmp_path, 2e-2)


@pytest.mark.parametrize("grad_wrt", [["1.weight"], ["3.bias", "1.bias"]])
@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("task", ["image_classification", "iterative_image_classification"])
def test_run__options(tmp_path: Path, grad_wrt: list[str], seed: int, task: str) -> None:
    options = {"projector_seed": seed, "lambda_reg": 0.1, "use_half_precision": False}
    if task == "image_classification":
        run = Run(options={**options, "grad_wrt": grad_wrt, "proj_dim": 4})
        found, expected = both(run, tmp_path)
    else:
        run = Run(options={**options, "task": task})
        expected = run.whole(
            trak.TRAKer,
            tmp_path / "old",
            gradient_computer=trak.gradient_computers.IterativeGradientComputer,
        )
        iterative = ours.gradient_computers.IterativeGradientComputer
        found = run.whole(ours.TRAKer, tmp_path / "new", gradient_computer=iterative)
    assert relative(found, expected) < 1e-5


@pytest.mark.parametrize("gradient_computer", ["FunctionalGradientComputer"])
@pytest.mark.parametrize("half", [False, True])
def test_run__with_classes_of_the_original(
    tmp_path: Path, gradient_computer: str, half: bool
) -> None:
    run = Run(n_checkpoints=2, options={"lambda_reg": 0.5, "use_half_precision": half})
    expected = run.whole(trak.TRAKer, tmp_path / "old")
    found = run.whole(
        ours.TRAKer,
        tmp_path / "new",
        gradient_computer=getattr(trak.gradient_computers, gradient_computer),
        saver=old_savers.MmapSaver,
        score_computer=old_computers.BasicScoreComputer,
        task=trak.modelout_functions.ImageClassificationModelOutput(),
    )
    assert relative(found, expected) < (2e-2 if half else 1e-6)


GRADIENTS = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["BasicProjector", "BasicSingleBlockProjector"])
@pytest.mark.parametrize("proj_type", ["normal", "rademacher"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize(("seed", "model_id"), [(0, 0), (7, 0), (0, 1), (11, 13)])
@pytest.mark.parametrize("proj_dim", [1, 6, 20])
@pytest.mark.parametrize("as_dict", [False, True])
def test_projector__same_matrix_and_product(
    name: str,
    proj_type: str,
    dtype: torch.dtype,
    seed: int,
    model_id: int,
    proj_dim: int,
    as_dict: bool,
) -> None:
    old, new = (
        getattr(m, name)(40, proj_dim, seed, proj_type, "cpu", block_size=6, dtype=dtype)
        for m in (old_projectors, projectors)
    )
    grads: Any = GRADIENTS
    if as_dict:
        grads = {"a": GRADIENTS[:, :39].reshape(3, 13, 3), "b": GRADIENTS[:, 39]}
    assert torch.equal(new.proj_matrix, old.proj_matrix)
    expected = old.project(grads, model_id=model_id)
    for _ in range(2):  # the second time from matrices that were kept
        found = new.project(grads, model_id=model_id)
        assert found.dtype == expected.dtype
        assert relative(found, expected) < (3e-3 if dtype == torch.float16 else 1e-6)
    if name == "BasicProjector":
        assert (new.seeds, new.num_blocks, new.jl_size) == (old.seeds, old.num_blocks, old.jl_size)


@pytest.mark.parametrize("n", [3, 40])
@pytest.mark.parametrize("lambda_reg", [0.0, 1.5])
@pytest.mark.parametrize("block", [7, 20_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_score_computer__same_matrices(
    n: int, lambda_reg: float, block: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(n)
    grads, targets = (torch.randn(rows, 3, generator=generator).to(dtype) for rows in (n, 4))
    old, new = (
        m.BasicScoreComputer(dtype, "cpu", block, 100, lambda_reg)
        for m in (old_computers, score_computers)
    )
    tolerance = 2e-2 if dtype == torch.float16 else 1e-4
    features = [each.get_x_xtx_inv(grads, each.get_xtx(grads)) for each in (new, old)]
    assert features[0].dtype == features[1].dtype
    assert relative(*features) < tolerance
    totals = [torch.ones(n, 4), torch.ones(n, 4)]
    for computer, feature, total in zip((new, old), features, totals, strict=True):
        computer.get_scores(feature, targets, total)
    assert relative(*totals) < tolerance


@pytest.mark.parametrize("sizes", [(1, 1), (3, 5), (100, 20)])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.float64])
@pytest.mark.parametrize("half", [False, True])
def test_matrix_mult__same(sizes: tuple[int, int], dtype: Any, half: bool) -> None:
    a, b = (torch.randn(n, 8, generator=torch.Generator().manual_seed(n)) for n in sizes)
    a, b = (a.half(), b.half()) if half else (a, b)
    found, expected = (m.get_matrix_mult(a, b, dtype) for m in (utils, old_utils))
    assert found.dtype == expected.dtype
    assert relative(found, expected) < 2e-3


@pytest.mark.parametrize("batch_size", [8, 16, 32, 2**28])
@pytest.mark.parametrize("model", MODELS)
def test_parameter_chunk_sizes__same_where_the_original_works(batch_size: int, model: str) -> None:
    found, expected = (
        m.get_parameter_chunk_sizes(built(model), batch_size) for m in (utils, old_utils)
    )
    if 0 in expected[1] or max(p.numel() for p in built(model).parameters()) >= expected[0]:
        assert sum(found[1]) == width(model)
        assert 0 < max(found[1]) <= found[0]
    else:
        assert (found[0], found[1]) == (expected[0], [int(size) for size in expected[1]])


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


@pytest.mark.parametrize(
    ("name", "new", "old"), [pytest.param(*each, id=each[0]) for each in signatures()]
)
def test_signature__same_names_order_and_defaults(name: str, new: Any, old: Any) -> None:
    def described(function: Any) -> list[tuple[str, Any, Any]]:
        parameters = inspect.signature(function).parameters.values()
        return [
            (p.name, p.kind, getattr(p.default, "__name__", p.default))
            for p in parameters
            if p.kind is not p.KEYWORD_ONLY
        ]

    assert described(new) == described(old)


QUICKSTART = """
import numpy as np
from torch.utils.data import DataLoader, TensorDataset
from tests.trak._runs import built, checkpoints, images
from {package} import TRAKer

train, targets = (TensorDataset(*images(n, seed=n)) for n in (200, 11))
states = checkpoints("normed", 2)
traker = TRAKer(
    model=built("normed"),
    task="image_classification",
    proj_dim=20,
    train_set_size=len(train),
    device="cpu",
    use_half_precision=False,
)
for model_id, checkpoint in enumerate(states):
    traker.load_checkpoint(checkpoint, model_id=model_id)
    for batch in DataLoader(train, batch_size=64):
        batch = [tensor.to("cpu") for tensor in batch]
        traker.featurize(batch=batch, num_samples=batch[0].shape[0])
traker.finalize_features()

for model_id, checkpoint in enumerate(states):
    traker.start_scoring_checkpoint(
        exp_name="pictures", checkpoint=checkpoint, model_id=model_id, num_targets=len(targets)
    )
    for batch in DataLoader(targets, batch_size=8):
        traker.score(batch=batch, num_samples=len(batch[0]))
scores = traker.finalize_scores(exp_name="pictures")

reopened = np.lib.format.open_memmap("./trak_results/scores/pictures.mmap")
assert np.array_equal(reopened, scores)
best = scores[:, 3].argsort()[-5:][::-1]
assert all(scores[best[i], 3] >= scores[best[i + 1], 3] for i in range(4))
"""
"""As the original's documentation has it, with BatchNorm, a DataLoader and the default folder."""


def test_quickstart__with_only_the_import_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = []
    for package in ("trakdask.trak", "trak"):
        (tmp_path / package).mkdir()
        monkeypatch.chdir(tmp_path / package)
        names: dict[str, Any] = {}
        exec(QUICKSTART.format(package=package), names)
        scores.append(np.array(names["scores"]))
    assert np.isfinite(scores[1]).all()
    assert relative(*scores) < 1e-4
