"""Find the tensors of a model in what people save, under whatever key, prefix and names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Set
from typing import Any, cast

import torch
from torch import Tensor, nn

from trakdask.errors import CheckpointError
from trakdask.models.loading import State, as_state, is_extra_state, loads_itself
from trakdask.models.pretrained import base_names, by_class, first_names
from trakdask.models.reading import Reading

# What torch puts into the names of modules that are compiled, sharded or recomputed.
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def fitted(
    module: nn.Module,
    content: Any,
    name: str,
    *,
    key: str | None = None,
    prefix: str | None = None,
    strict: bool = True,
) -> State:
    """Return the tensors of a checkpoint by the names that they have in the model.

    Parameters
    ----------
    module
        The model, on the meta device.
    content
        What a file holds: a state dict, or a mapping that has some.
    name
        Name of the checkpoint, for messages.
    key
        Key of the state dict; by default the only one whose tensors fit the model.
    prefix
        Take the tensors whose names start with it, and strip it. By default, a prefix that all
        names have in common is stripped if all tensors fit then.
    strict
        Whether all tensors must fit.

    Returns
    -------
    All tensors of the model, or all but the base model of a PEFT adapter. A model that loads itself
    gets what does not fit as it is.

    Raises
    ------
    CheckpointError
        If there is no state dict, none fits the model, or several do; or if it has different
        tensors under the names of a tied one.
    """
    # 1. The state dicts in the file, each by the names that may be those of the model: without the
    # prefix, and the names of wrappers.
    states = states_in(content, name, key)
    if prefix is not None or any(_plain(n) != n for state in states.values() for n in state):
        start = _plain(f"{prefix.removesuffix('.')}.") if prefix else ""
        given = [n for state in states.values() for n in state]
        plain = {at: {_plain(n): t for n, t in state.items()} for at, state in states.items()}
        cut = {at: _moved(plain[at], state, start) for at, state in states.items()}
        states = {at: state for at, state in cut.items() if state}
        if not states:
            raise CheckpointError(
                f"expected names of tensors that start with prefix={prefix!r} in checkpoint "
                f"{name!r}, got {given[:3]}; try another prefix"
            )
    optional = base_names(module)
    best = {at: _best_attempt(module, state, name, optional) for at, state in states.items()}
    # 2. Several that fit are a question for the user: nothing says which one was trained.
    if len(states) > 1:  # averaged weights may have a counter beside them
        fits = [at for at in states if not best[at][0] or _prefixes(module, states[at], optional)]
        if len(fits) > 1:
            raise CheckpointError(
                f"expected one state dict of the model in checkpoint {name!r}, got one under each "
                f"of the keys {fits}; try "
                + " or ".join(f"td.Model(..., key={at!r})" for at in fits)
            )
    # 3. The one that fits best, which must fit, and be one tensor where the model has one.
    at, (wrong, state) = min(best.items(), key=lambda item: len(item[1][0]))
    if wrong and loads_itself(module):  # whose code may rename tensors
        return state
    if wrong and strict:
        where = f"checkpoint {name!r}" if at is None else f"{at!r} of checkpoint {name!r}"
        raise _misfit(wrong, where, _advice(module, states[at], optional))
    _require_ties(module, state, name)
    if not optional:
        return state if loads_itself(module) else dict(state)
    # Of several names of a tensor the first one, so that the base model's cannot take its place.
    first, tensors = first_names(module), module.state_dict(keep_vars=True)
    return {first[id(tensors[name])]: tensor for name, tensor in state.items()}


def require_whole(module: nn.Module, state: State, name: str) -> None:
    """Reject an adapter and a base model that are not the whole model together."""
    _require_ties(module, state, name)
    if wrong := _differences(module, state, set())[0]:
        where = f"checkpoint {name!r} with its base model"
        raise _misfit(wrong, where, _advice(module, state, {name}))


def _require_ties(module: nn.Module, state: State, checkpoint: str) -> None:
    """Reject a checkpoint with different tensors under the names of one tensor of the model."""
    names, given = Reading(module).names, dict[str, str]()
    for name, tensor in state.items():
        if name in names:
            other = given.setdefault(names[name], name)
            # In one precision, as files may mix them, and NaN as 0: it is not equal to itself.
            if not torch.equal(*(t.double().nan_to_num() for t in (state[other], tensor))):
                raise CheckpointError(
                    f"expected the same tensor as {other!r} and as {name!r}, which are tied in the "
                    f"model, got different ones in checkpoint {checkpoint!r}; try a build function "
                    "that does not tie them (a model of transformers has tie_word_embeddings=False "
                    "in its config), or a checkpoint that has one of them"
                )


def _misfit(wrong: list[str], where: str, advice: str) -> CheckpointError:
    return CheckpointError(
        f"expected {wrong[0]}, in {where} ({len(wrong)} tensors differ); try {advice}"
    )


def states_in(content: Any, name: str, key: str | None = None) -> dict[str | None, State]:
    """Return the state dict that is the content of a checkpoint, or those in it by their keys."""
    if key is not None and isinstance(content, Mapping) and key in content:
        return states_in(content[key], name)
    if _is_state(content):
        return {None: as_state(content)}
    items = content.items() if isinstance(content, Mapping) else ()
    inside: dict[str | None, State] = {at: as_state(x) for at, x in items if _is_state(x)}
    if inside and key is None:
        return inside
    others = [at for at, value in items if not isinstance(value, Tensor)]
    advice = "model.state_dict()"
    if inside:
        advice = f"td.Model(..., key={next(iter(inside))!r})"
    elif 0 < len(others) < len(items):
        advice = f"the same without {others[0]!r}, which is no tensor"
    raise CheckpointError(
        f"expected a state dict (tensors by parameter name) in checkpoint {name!r}, got "
        f"{type(content).__name__} with the keys {[at for at, _ in items][:5]}; try {advice}"
    )


def _is_state(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and any(isinstance(entry, Tensor) for entry in value.values())
        and all(isinstance(v, Tensor) or is_extra_state(str(n)) for n, v in value.items())
    )


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _best_attempt(
    module: nn.Module, state: State, name: str, optional: Set[str]
) -> tuple[list[str], State]:
    """Return the first renamed state dict that fits, or the closest one and how it differs."""
    attempts = []
    # Files of torch before 0.4.1, and of other libraries, have no counters of BatchNorm.
    counters = {n for n in module.state_dict() if n.endswith(".num_batches_tracked")} - optional
    for attempt in _attempts(module, state, name):
        attempt |= {n: torch.tensor(0) for n in counters - attempt.keys()}
        missing, further = _differences(module, attempt, optional)
        attempts.append((missing + further, attempt))
        if not missing + further:
            break
    return min(attempts, key=lambda attempt: len(attempt[0]))


def _attempts(module: nn.Module, state: State, name: str) -> Iterator[State]:
    needed = {_plain(name): name for name in module.state_dict()}
    # 1. As they are, or as tensors of a module that had the model inside, such as DDP's.
    for start in ("", *_common_prefixes(state)):
        yield _without(start, state, needed)
    # 2. As tensors of the only module inside of the model that has any.
    bare = _moved(state, state, "module." if "module." in _common_prefixes(state) else "")
    for start in _common_prefixes(needed):  # the tensors of a module inside of the model
        inside = {needed.get(start + n, n): tensor for n, tensor in bare.items()}
        yield _moved(inside, bare, to=start)
    # 3. As the class of transformers or PEFT renames them; last, because that copies the model.
    if (loaded := by_class(module, state, name)) is not None:
        yield loaded


def _without(start: str, state: State, needed: Mapping[str, str]) -> State:
    """Return the tensors whose names start with a prefix, by the model's names without it."""
    moved = _moved(state, state, start)
    return _moved({needed.get(n, n): tensor for n, tensor in moved.items()}, moved)


def _moved(tensors: State, state: State, start: str = "", to: str = "") -> State:
    """Return the tensors whose names start with a prefix, without it.

    The versions of modules, by which their code knows how to read a file, go with them: those of
    ``state``, from the paths with the prefix to others.
    """
    moved: Any = OrderedDict(
        (n[len(start) :], t) for n, t in tensors.items() if n.startswith(start)
    )
    versions = getattr(state, "_metadata", None) or {}
    paths = {f"{_plain(path)}." if path else "": version for path, version in versions.items()}
    moved._metadata = {
        f"{to}{path[len(start) :]}".removesuffix("."): version
        for path, version in paths.items()
        if path.startswith(start)
    }
    return cast(State, moved)


def _common_prefixes(names: Mapping[str, object]) -> list[str]:
    steps = next(iter(names)).split(".")[:-1]
    starts = ["".join(f"{step}." for step in steps[: n + 1]) for n in range(len(steps))]
    return [start for start in starts if all(name.startswith(start) for name in names)]


def _differences(
    module: nn.Module, state: State, optional: Set[str]
) -> tuple[list[str], list[str]]:
    """Return what the model has and the state dict does not, and the other way round."""
    needed = {n: t for n, t in module.state_dict(keep_vars=True).items() if not is_extra_state(n)}
    # One of the names of tied weights is enough.
    present = {id(tensor) for name, tensor in needed.items() if name in state or name in optional}
    missing = []
    for name, tensor in needed.items():
        got = tuple(state[name].shape) if name in state else "no such tensor"
        is_elsewhere = name not in state and id(tensor) in present
        if got != (shape := tuple(tensor.shape)) and not is_elsewhere:
            missing.append(f"{name!r} of shape {shape}, got {got}")
    further = [n for n in state if n not in needed and not is_extra_state(n)]
    return missing, [f"tensors of the model, got {n!r} too" for n in further]


def _prefixes(module: nn.Module, state: State, optional: Set[str]) -> list[str]:
    """Return the prefixes under which a state dict has all tensors of the model, among others."""
    needed = {_plain(name): name for name in module.state_dict()}
    ends = (end for end in needed if any(f".{name}".endswith(f".{end}") for name in state))
    end = next(ends, "no such tensor")
    starts = [name.removesuffix(end) for name in state if f".{name}".endswith(f".{end}")]
    found = {start: _without(start, state, needed) for start in starts}
    return [
        start for start, inside in found.items() if not _differences(module, inside, optional)[0]
    ]


def _advice(module: nn.Module, state: State, optional: Set[str]) -> str:
    prefixes = _prefixes(module, state, optional)
    if prefixes and "" not in prefixes:
        return " or ".join(f"td.Model(..., prefix={start!r})" for start in prefixes)
    if optional:
        return (
            "a build function with the configuration of the training (same kind of adapter, same "
            "target modules)"
        )
    if all(name.startswith(("base_model.", "prompt_embeddings")) for name in state):
        return "a build function that returns the adapter, too: peft.get_peft_model(base, config)"
    shapes = {name: tensor.shape for name, tensor in module.state_dict(keep_vars=True).items()}
    missing = [name for name in shapes if name not in state]
    if len(missing) == 1 and (twins := [n for n in state if shapes.get(n) == shapes[missing[0]]]):
        pair = f"{missing[0]!r}: state[{twins[0]!r}]"
        return f"a build function that ties the two, or {{**state, {pair}}} as the checkpoint"
    return "the build function that this checkpoint was trained with"
