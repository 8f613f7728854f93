"""Train checkpoints on random halves of the samples, so that scores can grade themselves."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
import xarray as xr
from numpy.typing import NDArray

from trakdask import arrays
from trakdask.checks import require_integer, shown
from trakdask.evaluate.retraining import bar_of, stored_spec, trained_alone
from trakdask.files import Folder
from trakdask.samples.array_source import validate_samples
from trakdask.variables import CHECKPOINT, SAMPLE, TRAINED_ON

if TYPE_CHECKING:  # evaluations that train nothing need no torch
    from torch import Tensor, nn

_SPEC = "halves.json"


def train_on_halves(
    train_fn: Callable[[NDArray[np.int64], int], nn.Module | Mapping[str, Tensor]],
    samples: xr.Dataset,
    folder: str | os.PathLike[str],
    n: int = 10,
    *,
    seed: int = 0,
    tag: str = "",
    progress: bool = True,
) -> tuple[dict[str, str], xr.Dataset]:
    """Train models on random halves of the samples, and note what each was trained on.

    A model of a half is a retrained model of the others, so that its outputs tell how good scores
    are (:func:`trakdask.evaluate.cross_validate`) and which λ suits them, without any further
    training. The mean of their scores is mostly better than the mean of as many models of all
    samples, and they cost half as much to train.

    Parameters
    ----------
    train_fn
        A function of the positions of the samples to train on, ascending int64, and of a seed below
        2³¹, which returns the trained module or its ``state_dict()``. With a Trainer of Hugging
        Face: ``trainer.train()`` on ``dataset.select(positions)``, then ``trainer.model``.
    samples
        Training samples, as in :func:`trakdask.featurize`.
    folder
        Folder or fsspec URL for the files ``half-0.pt``, ``half-1.pt``, ... A model whose file is
        there is not trained again: call with a larger ``n`` for more.
    n
        Number of models. Ten grade scores well; from five on they choose λ.
    seed
        Seed of the halves and of the models' own seeds. A half depends on it, on the number of the
        half and on the number of samples.
    tag
        Name of the recipe. Files that were trained under another tag are refused.
    progress
        Show a bar of completed models.

    Returns
    -------
    checkpoints
        Paths by name, for :class:`trakdask.Model`.
    samples
        The samples with the coord ``trained_on`` (sample, checkpoint), bool, which
        :func:`trakdask.featurize` takes over into the features.

    Raises
    ------
    StoreMismatchError
        If the folder has models of another number of samples, another seed or tag.
    BlockError
        If ``train_fn`` raises an error, or returns neither a module nor a mapping; it names the
        half. Checkpoints from before stay.

    Notes
    -----
    One task per model, on the active Dask client or on threads; a process trains one model at a
    time, so that ``train_fn`` may seed global generators. ``torch.manual_seed(seed)`` is called
    before. A :class:`UserWarning` says if the values of the samples, such as their labels, have
    changed since models in the folder were trained. A change of ``train_fn`` cannot be seen; give
    each recipe a ``tag`` or a folder of its own.

    References
    ----------
    Park et al. 2023, section 3.2: ensembles of models trained on subsets.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np, torch, trakdask as td
    >>> x = np.random.default_rng(0).normal(size=(40, 3)).astype("f4")
    >>> samples = td.from_arrays({"image": x}, coords={"label": (x[:, 0] > 0).astype(int)})
    >>> def train(positions, seed):
    ...     model = torch.nn.Linear(3, 2)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ...     labels = torch.tensor(samples.label.values)[positions]
    ...     for _ in range(20):
    ...         loss = torch.nn.functional.cross_entropy(model(torch.tensor(x[positions])), labels)
    ...         optimizer.zero_grad()
    ...         loss.backward()
    ...         optimizer.step()
    ...     return model
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoints, samples = td.evaluate.train_on_halves(
    ...         train, samples, folder, n=3, progress=False
    ...     )
    ...     model = td.Model(torch.nn.Linear(3, 2), checkpoints, "image_classification")
    ...     features = td.featurize(samples, model).compute()
    >>> features.trained_on.sum("sample").values.tolist()
    [20, 20, 20]
    """
    n = require_integer("n", n, 1, remedy="try n=10")
    n_samples = samples.sizes[SAMPLE]
    masks = arrays.subsets.random_subsets(n_samples, n, n_samples // 2, seed).compute()
    models = Folder.at(folder)
    spec = {"samples": n_samples, "seed": seed, "tag": tag}
    source = validate_samples(samples).attrs["source"]
    # Files of another recipe are refused; of changed labels there is a warning, since it may be
    # metadata.
    stored = stored_spec(models, _SPEC, spec)
    if stored is None:
        models.write(_SPEC, json.dumps({**spec, "source": source}).encode())
    elif stored.get("source", source) != source:
        warnings.warn(
            f"the values of the samples, such as their labels, are not those that the models in "
            f"{models.url!r} were trained on, and these models are not trained again. Try another "
            "folder, unless only metadata have changed.",
            stacklevel=2,
        )
    names = [f"half-{i}" for i in range(n)]
    # A file is complete or absent, so its name says that the model was trained.
    missing = [i for i, name in enumerate(names) if f"{name}.pt" not in models.names()]
    # Whatever it closes over goes to each worker once, and is not searched for lazy arrays.
    function = dask.delayed(train_fn, traverse=False)
    train = dask.delayed(functools.partial(_train, models))
    # Seeds of 31 bits, which fit every generator, for each half its own, whatever n is.
    hashes = (hashlib.sha256(f"{seed}-{i}".encode()).hexdigest()[:8] for i in missing)
    tasks = [
        train(function, np.flatnonzero(masks[i]), i, int(digits, 16) >> 1, pure=False)
        for i, digits in zip(missing, hashes, strict=True)
    ]
    with bar_of(models, models.name, {f"{name}.pt" for name in names}, bool(missing) and progress):
        dask.compute(*tasks)
    known = xr.DataArray(masks, dims=(CHECKPOINT, SAMPLE), coords={CHECKPOINT: names})
    paths = {name: f"{models.url}/{name}.pt" for name in names}
    return paths, samples.assign_coords({TRAINED_ON: known})


def _train(models: Folder, train_fn: Any, positions: NDArray[np.int64], i: int, seed: int) -> None:
    """Train a model and put its weights into the folder."""
    import torch  # it takes a second, and the other evaluations need none

    def weights(positions: NDArray[np.int64], seed: int) -> Mapping[str, Tensor]:
        torch.manual_seed(seed)
        trained = train_fn(positions, seed)
        state = trained.state_dict() if isinstance(trained, torch.nn.Module) else trained
        if not isinstance(state, Mapping):
            raise TypeError(
                f"expected train_fn to return a module or its state_dict(), got {shown(state)}; "
                "try return model"
            )
        return state

    state = trained_alone(weights, positions, seed, f"half {i} ({len(positions)} samples)")
    with models.writing(f"half-{i}.pt") as file:
        torch.save({name: tensor.detach().cpu() for name, tensor in state.items()}, file)
