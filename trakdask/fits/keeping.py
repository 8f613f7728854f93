"""What a fit keeps while it runs, so that it goes on after a kill: blocks, and whole checkpoints.

They are files in a folder beside the store. One that cannot be read, or holds other values than it
says, is computed again.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

import dask.array as da
import numpy as np

from trakdask.bars import skipped
from trakdask.execution import n_slots
from trakdask.featurization.graphs import GraphInputs, block_tasks, variable_of
from trakdask.files import Folder
from trakdask.models.model import Model
from trakdask.projection.fitted import Fitted

_FOLDER: ContextVar[Folder | None] = ContextVar("folder", default=None)
"""Where the passes of this context keep their blocks."""

_log = logging.getLogger(__name__)


def kept_blocks(array: da.Array) -> da.Array:
    """Return an array whose blocks along samples are kept, and read if they are there already.

    Tasks write them. Whatever follows gets the same blocks in the same order, so that not one bit
    of a sum depends on which of them were there.
    """
    if (folder := _FOLDER.get()) is None:
        return array
    title, there = array.name, set(folder.names())
    files = [_file(title, i) for i in range(array.numblocks[0])]
    is_kept = [file in there and _content(folder, file) is not None for file in files]
    skipped(title, sum(is_kept))
    options = {"dtype": array.dtype, "meta": array._meta}
    write, read = (partial(function, folder, title) for function in (_written, _read))
    written = da.map_blocks(write, array, name=f"keep-{title}", **options)
    kept = da.map_blocks(read, chunks=array.chunks, name=f"kept-{title}", **options)
    both = [(kept if is_there else written).blocks[i] for i, is_there in enumerate(is_kept)]
    return da.concatenate(both) if any(is_kept) else written


def kept_rows(*columns: da.Array) -> list[da.Array]:
    """Return columns of samples side by side, (sample, column) for each checkpoint, in kept blocks.

    Each is (sample, column, checkpoint), or one column (sample, checkpoint).
    """
    wide = [array if array.ndim == 3 else array[:, None] for array in columns]
    both = da.concatenate(wide, axis=1).rechunk({1: -1})
    return [kept_blocks(both[..., i]) for i in range(both.shape[2])]


def kept_sketches(
    run: Callable[..., Any], prepared: GraphInputs, n_columns: int, title: str
) -> list[da.Array]:
    """Return what ``run`` makes of each block of samples, as rows of sketch, f and Q."""
    token = prepared.token
    tasks = block_tasks(run, "sc", prepared, token, name=f"{title}-{token}")
    new_axes = {"p": n_columns}
    sketches = variable_of(tasks, "sc", "spc", 0, f"{title}-0-{token}", new_axes=new_axes)
    others = [variable_of(tasks, "sc", "sc", i, f"{title}-{i}-{token}") for i in (1, 2)]
    return kept_rows(sketches, *others)


def kept_fits(
    folder: Folder | None,
    files: Mapping[str, str],
    model: Model,
    compute: Callable[[Model], Fitted],
    n_blocks: int,
    total: int,
) -> dict[str, Fitted]:
    """Return the fit at each checkpoint, as a folder has it, or computed and written.

    Parameters
    ----------
    folder
        Beside the store; nothing is kept without one.
    files
        The name of the file of each checkpoint.
    compute
        Fits the model that it is given, at all of its checkpoints.
    model
        What is fitted. As many checkpoints run side by side as workers need to be busy.
    n_blocks, total
        The blocks of a pass over the samples at one checkpoint, and those of all its passes.
    """
    # 1. What the folder has.
    made: dict[str, Fitted] = {}
    for name, file in files.items():
        if folder is not None and (known := _fit(folder, file)) is not None:
            made[name] = known
            skipped(file, total)
    # 2. All others, each of which is written as soon as it is there.
    lacking = [name for name in files if name not in made]
    blocks = None if folder is None else folder / "blocks"
    n, token = max(1, n_slots() // n_blocks), _FOLDER.set(blocks)
    try:
        for names in (lacking[i : i + n] for i in range(0, len(lacking), n)):
            fit = compute(model.at_checkpoints(names))
            for name in names:
                made[name] = fit.at_checkpoints([name])
                if folder is not None:
                    _write_fit(folder, files[name], made[name])
            if blocks is not None:
                blocks.remove()
    finally:
        _FOLDER.reset(token)
    return {name: made[name] for name in files}


def _file(title: str, number: int) -> str:
    return f"{title}-{number}.npz"


def _written(
    folder: Folder, title: str, block: np.ndarray, block_id: tuple[int, ...]
) -> np.ndarray:
    file = io.BytesIO()
    np.savez(file, block=block)
    folder.write(_file(title, block_id[0]), file.getvalue(), durable=False)
    return block


def _read(folder: Folder, title: str, block_id: tuple[int, ...]) -> np.ndarray:
    content = _content(folder, _file(title, block_id[0]))
    if content is None:
        raise OSError(
            f"expected the blocks of a fit in {folder.url!r}, which were there when the fit began; "
            "try the same call again"
        )
    return content["block"]


def _content(folder: Folder, file: str) -> dict[str, np.ndarray] | None:
    """Return the arrays of a file, whose checksums it has; None if it cannot be read."""
    try:
        return dict(np.load(io.BytesIO(folder.read(file))))
    except FileNotFoundError:
        return None
    except PermissionError:
        raise
    except Exception as err:  # bytes that anybody may have put there fail in many ways
        _warn(folder, file, err)
        return None


def _warn(folder: Folder, file: str, err: Exception) -> None:
    _log.warning(
        "%s/%s is no kept fit (%s), and is made again", folder.url, file, type(err).__name__
    )


def _fit(folder: Folder, file: str) -> Fitted | None:
    """Return the fit that a folder has under a name."""
    if (content := _content(folder, file)) is None:
        return None
    try:
        about = json.loads(str(content.pop("about")))
        if about.pop("of") != file:
            raise ValueError("it is of another model, or of other samples or options")
        rows = {
            name: (of, content.pop("places"), content.pop("rows"))
            for name, of in about.pop("rows", {}).items()  # of one checkpoint at most
        }
        fit = Fitted.from_spec(about.pop("projector"), arrays=content, rows=rows, **about)
        fit.require_digests()
    except Exception as err:
        _warn(folder, file, err)
        return None
    return fit


def _write_fit(folder: Folder, file: str, fit: Fitted) -> None:
    about = {"of": file, "projector": fit.spec(), "digests": fit.digests, "model": fit.model}
    about["rows"], arrays = {name: of for name, (of, *_) in fit.rows.items()}, dict(fit.arrays)
    for _, places, rows in fit.rows.values():  # of one checkpoint at most
        arrays |= {"places": places, "rows": rows}
    content = io.BytesIO()
    np.savez(content, about=np.array(json.dumps(about)), **arrays)
    folder.write(file, content.getvalue())
