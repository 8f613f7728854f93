"""Checkpoints are read safely, known by their content, and cached while they fit."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import save_file

from trakdask.errors import CheckpointError
from trakdask.models import checkpoints as module
from trakdask.models.checkpoints import Checkpoint, State, States, digest_state


def make_checkpoints(checkpoints: object, **options: object) -> tuple[Checkpoint, ...]:
    return module.make_checkpoints(checkpoints, torch.nn.Linear(4, 2, device="meta"), **options)


def cached_state(checkpoint: Checkpoint) -> State:
    return module.cached_state(checkpoint, torch.nn.Linear(4, 2, device="meta"))


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return dict(torch.nn.Linear(4, 2).state_dict())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed in range(3):
        torch.save(state(seed), tmp_path / f"c{seed}.pt")
    return tmp_path


def test_digest_state__depends_on_content_only() -> None:
    reordered = dict(reversed(state().items()))
    assert digest_state(state()) == digest_state(reordered)
    assert digest_state(state()) != digest_state(state(1))
    assert digest_state({"a": torch.zeros(2, 3)}) != digest_state({"a": torch.zeros(3, 2)})
    assert digest_state({"a": torch.zeros(2)}) != digest_state({"b": torch.zeros(2)})


def test_make_checkpoints__same_content_in_three_formats(folder: Path, bucket: str) -> None:
    save_file(state(), folder / "s.safetensors")
    torch.save(state(), folder / "old.pt", _use_new_zipfile_serialization=False)
    sources = [folder / "c0.pt", folder / "s.safetensors", folder / "old.pt", state()]
    for name in ("c0.pt", "s.safetensors"):
        fsspec.filesystem("memory").put_file(str(folder / name), f"/checkpoints/{name}")
        sources.append(f"{bucket}/{name}")
    made = [make_checkpoints([source])[0] for source in sources]
    assert {(each.digest, each.id) for each in made} == {(digest_state(state()), made[0].id)}
    assert [each.name for each in made] == ["c0", "s", "old", "0", "c0", "s"]


class _Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("form", ["zip", "pickle"])
def test_make_checkpoints__pickled_code_is_refused_and_does_not_run(
    tmp_path: Path, form: str
) -> None:
    trap, path = tmp_path / "it-ran", tmp_path / "evil.pt"
    evil = {"weight": _Malicious(trap)}
    if form == "zip":
        torch.save(evil, path)
    else:
        path.write_bytes(pickle.dumps(evil, protocol=2))
    with pytest.raises(CheckpointError, match=r"evil\.pt.*model.state_dict\(\)") as err:
        make_checkpoints([path])
    assert str(err.value).isprintable()  # torch prints its advice in bold
    assert not trap.exists()


def renamed(prefix: str, seed: int = 0) -> State:
    return {prefix + name: tensor for name, tensor in state(seed).items()}


SAVED: dict[str, tuple[object, dict[str, str]]] = {
    "of Lightning": ({"state_dict": renamed("net."), "epoch": 3, "loops": {"a": {}}}, {}),
    "of DDP": (renamed("module."), {}),
    "compiled": (renamed("_orig_mod."), {}),
    "both, in a loop of torch": ({"model": renamed("module._orig_mod."), "best": 0.5}, {}),
    "sharded": (renamed("_fsdp_wrapped_module."), {}),
    "averaged beside, by key": ({"model": state(1), "ema": state()}, {"key": "ema"}),
    "averaged beside, by prefix": (renamed("net.", 1) | renamed("ema.net."), {"prefix": "ema.net"}),
    "with a loss": (renamed("net.") | {"loss.weight": torch.ones(2)}, {"prefix": "net."}),
    "key and prefix": (
        {"a": renamed("net.") | renamed("x.", 1), "b": state(2)},
        {"key": "a", "prefix": "net"},
    ),
    "AveragedModel": ({"n_averaged": torch.tensor(3)} | renamed("module."), {"prefix": "module."}),
}


@pytest.mark.parametrize(
    ("case", "name"),
    [*((case, "c.ckpt") for case in SAVED), ("of DDP", "c.pth.tar"), ("of Lightning", "c.th")],
)
def test_make_checkpoints__what_people_save(
    tmp_path: Path, bucket: str, case: str, name: str
) -> None:
    content, options = SAVED[case]
    torch.save(content, tmp_path / name)
    fsspec.filesystem("memory").put_file(str(tmp_path / name), f"/checkpoints/{name}")
    for given in (content, tmp_path / name, f"{bucket}/{name}"):
        (made,) = make_checkpoints([given], **options)
        assert made.digest == digest_state(state())
        module._states.by_digest.clear()
        assert digest_state(cached_state(pickle.loads(pickle.dumps(made)))) == made.digest


def test_make_checkpoints__a_file_for_a_module_inside_of_the_model() -> None:
    wrapped = torch.nn.Sequential(torch.nn.Linear(4, 2, device="meta"))
    for given in (state(), renamed("module.")):
        (made,) = module.make_checkpoints([given], wrapped)
        assert digest_state(module.cached_state(made, wrapped)) == digest_state(renamed("0."))


@pytest.mark.parametrize("prefix", ["", "module.", "net."])
def test_make_checkpoints__a_file_without_the_counters_of_batch_norm(prefix: str) -> None:
    """As torchvision's first ones; ``load_state_dict`` takes them, too."""
    norm = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3))
    whole = norm.state_dict()
    given = {prefix + n: t for n, t in whole.items() if not n.endswith("num_batches_tracked")}
    (made,) = module.make_checkpoints([given], norm.to("meta"))
    assert digest_state(module.cached_state(made, norm)) == digest_state(whole)


@pytest.mark.parametrize("name", ["c0.pt", "c0.safetensors"])
def test_cached_state__file_overwritten_while_in_use(folder: Path, name: str) -> None:
    save_file(state(), folder / "c0.safetensors")
    (checkpoint,) = make_checkpoints([folder / name])
    (folder / name).write_bytes(b"\0" * (folder / name).stat().st_size)
    assert digest_state(cached_state(checkpoint)) == checkpoint.digest


def test_make_checkpoints__given_state_is_copied() -> None:
    live = state()
    (checkpoint,) = make_checkpoints([live])
    live["weight"].add_(1)  # training goes on
    assert digest_state(cached_state(checkpoint)) == checkpoint.digest


@pytest.fixture
def bucket() -> Iterator[str]:
    """An object store in this process."""
    fs = fsspec.filesystem("memory")
    fs.mkdir("/checkpoints")
    yield "memory://checkpoints"
    fs.rm("/checkpoints", recursive=True)


def test_cached_state__another_file_at_the_path(folder: Path) -> None:
    """As on another host: features of other weights would have the old name."""
    (checkpoint,) = make_checkpoints([folder / "c0.pt"])
    torch.save(state(5), folder / "c0.pt")
    module._states.by_digest.clear()
    expected = rf"'c0'.*{checkpoint.digest[:12]}.*{socket.gethostname()}"
    with pytest.raises(CheckpointError, match=expected):
        cached_state(checkpoint)
    (folder / "c0.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"c0\.pt"):
        cached_state(checkpoint)


# ------------------------------------------------------------------------------------------- cache

BYTES = 4 * 10


def read(states: States, digest: str) -> list[str]:
    """Ask for a state dict; return the digest if it had to be read."""
    reads = []

    def reading() -> State:
        reads.append(digest)
        return {"weight": torch.full((10,), float(digest))}

    state = states.get(digest, reading)
    assert state["weight"].tolist() == [float(digest)] * 10
    return reads


@pytest.mark.parametrize(
    ("most_bytes", "kept"), [(0, "14"), (2 * BYTES, "14"), (3 * BYTES, "314"), (9 * BYTES, "2314")]
)
def test_get__keeps_the_last_two_and_what_fits_and_was_used_last(
    most_bytes: int, kept: str
) -> None:
    states = States()
    states.most_bytes = most_bytes
    for digest in "12314":
        read(states, digest)
    assert list(states.by_digest) == list(kept)
    assert read(states, "4") == read(states, "1") == []


def test_get__threads_wait_for_the_one_that_reads() -> None:
    states = States()
    with ThreadPoolExecutor(8) as pool:
        reads = list(pool.map(lambda _: read(states, "1"), range(8)))
    assert sorted(reads) == [[]] * 7 + [["1"]]
