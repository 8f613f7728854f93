"""A reader of feature stores that knows docs/reference/store_format.md, and nothing of trakdask."""

import hashlib
import json
import zlib
from pathlib import Path

import numpy as np
import zarr

SPEC = (
    *("projector", "checkpoints", "checkpoint_ids", "parameters", "task", "source"),
    *("dtype", "autocast", "float32_matmul_precision"),
)


def read(store: Path, coord: str) -> dict:
    """Return features, a coord, gram matrix, λ and eigenvectors of a store, as they count now."""
    parts = [zarr.open_group(folder, mode="r") for folder in parts_of(store)]
    drop, assigned = edit_of(store, "drops"), edit_of(store, "assigned")
    sources: dict[str, list] = {}
    for part in parts:
        sources.setdefault(part.attrs["source"], []).append(part)
    names = shared_checkpoints(sources)
    feature = np.concatenate([feature_of(own, names) for own in sources.values()])
    values = np.concatenate([own[0][coord][:] for own in sources.values()])
    if assigned is not None and coord in assigned:
        values[: assigned[coord].shape[0]] = assigned[coord][:]
    kept, source = np.ones(len(values), bool), " + ".join(sources)
    if drop is not None:
        kept[: drop["dropped"].shape[0]] = ~drop["dropped"][:]
        source += " without " + digest({"dropped": np.packbits(~kept).tobytes().hex()})[:16]
    factors = edit_of(store, "factors")
    if factors is not None:  # the gram matrix that they are of
        known = factors.attrs["source"], factors.attrs["checkpoints"], factors.attrs["samples"]
        assert known == (source, names, kept.sum())
    return {
        "checkpoint": names,
        "feature": feature[kept],
        coord: values[kept],
        "gram": gram_of(parts, drop, names),
        "damping": factors.attrs["damping"]["values"] if factors is not None else None,
        "gram_eigenvectors": factors["gram_eigenvectors"][:] if factors is not None else None,
    }


def digest(value: object) -> str:
    """Return the SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def parts_of(store: Path) -> list[Path]:
    """Return the folders of the parts, without an append that was cut short."""
    appended = sorted((store / "parts").glob("[0-9]*"), key=lambda folder: int(folder.name))
    controls = [(folder, folder / "records") for folder in (store, *appended)]
    made = [
        f for f, control in controls if control.exists() and not (control / "unfinished").exists()
    ]
    while len(made) > 1 and not is_complete(made[-1]):
        made.pop()
    assert all(map(is_complete, made)), "blocks of the store are missing"
    return made


def is_complete(folder: Path) -> bool:
    """Return whether all blocks of a part have records, and the files that these list."""
    attrs = dict(zarr.open_group(folder, mode="r").attrs)
    layout, ids = attrs["layout"], attrs["checkpoint_ids"].values()
    key = digest({"spec": {name: attrs[name] for name in SPEC if name in attrs}, "layout": layout})
    blocks = [*map(str, range(-(-layout["samples"] // layout["block"])))]
    blocks += ["gram"] if (folder / "gram").exists() else []
    records = [
        folder / "records" / key[:16] / f"{id:08x}" / f"{block}.json"
        for id in ids
        for block in blocks
    ]
    return all(record.exists() and is_whole(folder, record, key) for record in records)


def is_whole(folder: Path, record: Path, key: str) -> bool:
    """Return whether a record is of this part, and its files are as they were written."""
    content = json.loads(record.read_text())
    return content["spec"] == key and are_as_written(folder, content["files"])


def are_as_written(folder: Path, files: dict[str, list[int]]) -> bool:
    """Return whether files have the sizes and checksums that were recorded of them."""
    paths = {folder / path: about for path, about in files.items()}
    return all(
        path.exists() and [path.stat().st_size, zlib.crc32(path.read_bytes())] == about
        for path, about in paths.items()
    )


def edit_of(store: Path, kind: str) -> zarr.Group | None:
    """Return the last edit of a kind that was written whole."""
    for folder in sorted((store / kind).glob("[0-9]*"), key=lambda folder: -int(folder.name)):
        attrs = dict(zarr.open_group(folder, mode="r").attrs)
        if "files" in attrs:
            assert attrs.pop("digest") == digest(attrs)
            files = {path: about for path, about in attrs["files"].items() if path != "zarr.json"}
            assert are_as_written(folder, files)
            return zarr.open_group(folder, mode="r")
    return None


def shared_checkpoints(sources: dict[str, list]) -> list[str]:
    """Return the checkpoints that all samples have, in the order of the first source."""
    names = [
        [name for part in own for name in part.attrs["checkpoints"]] for own in sources.values()
    ]
    return [name for name in names[0] if all(name in each for each in names)]


def feature_of(parts: list, names: list[str]) -> np.ndarray:
    """Return features of the samples of one source at some checkpoints."""
    own = [name for part in parts for name in part.attrs["checkpoints"]]
    joined = np.concatenate([scaled(part) for part in parts], axis=-1)
    return joined[..., [own.index(name) for name in names]]


def scaled(part: zarr.Group) -> np.ndarray:
    """Return the features of a part; those that are stored as float16 have a scale."""
    feature = part["feature"][:]
    if "feature_scale" not in part:
        return feature
    return feature.astype("f4") * part["feature_scale"][:][:, None].astype("f4")


def gram_of(parts: list, drop: zarr.Group | None, names: list[str]) -> np.ndarray:
    """Return the gram matrix of the whole: what a drop left, and all parts since."""
    added = parts if drop is None else parts[drop.attrs["pieces"] :]
    summands = [(part, list(part.attrs["checkpoints"])) for part in added]
    summands += [] if drop is None else [(drop, drop.attrs["checkpoints"])]
    return np.stack(
        [sum(g["gram"][..., own.index(n)] for g, own in summands if n in own) for n in names], -1
    )
