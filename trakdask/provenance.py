"""Record in ``attrs`` how features were made, and reject features that were made differently."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import xarray as xr

from trakdask.checks import shown
from trakdask.errors import StoreMismatchError, warn_once
from trakdask.variables import CHECKPOINT, COLUMN, PROJ_DIM, checkpoint_names

_CHECKPOINTS = ("checkpoints", "checkpoint_ids")
REQUIRED_SPEC = (*_CHECKPOINTS, "projector", "parameters", "task")
"""Attrs that all features have."""

BY_CHECKPOINT = (*_CHECKPOINTS, "fit")
"""Attrs that are mappings from the names of checkpoints."""

FEATURE_SPEC = (*_CHECKPOINTS, "made_by", "projector", "fit", "parameters", "task", "code")
"""Attrs that training and target features must share for their product to be meaningful."""

PRECISION = ("dtype", "autocast", "float32_matmul_precision")
STORE_SPEC = (*FEATURE_SPEC, "source", *PRECISION)
"""Attrs that all blocks of a store must share: the same samples and the same precision, too."""

TASK_FIELDS = "task_fields"
"""The attr with class and settings of the task, of which ``task`` is the text for people."""

_REMEDY = {
    "checkpoints": "the same checkpoints for both, in one td.Model, or selecting the ones that "
    "both have, in the same order: ds.sel(checkpoint=[...])",
    "checkpoint": "selecting the same checkpoints, in the same order, from both",
    "projector": "td.featurize(samples, model, like=features), which makes others as these were",
    "fit": "td.featurize(samples, model, like=features), which takes the fit from these",
    COLUMN: "the same isel(proj_dim=...) on both",
    "code": "featurizing both again with the code of today, or, if the change does not alter the "
    "model's output, features.attrs['code'] = other.attrs['code']",
    "source": "another store, append_dim='sample' if these are more samples of it, or, where the "
    "code that makes the samples can say that the data are the same, samples.attrs['source']",
    "variables": "the same for both; td.assign_coords(store, {'trained_on': masks}) gives a store "
    "that has none which checkpoints were trained on which samples",
    "tag": "another store, or the store's tag= if both train models in the same way",
}


def spec(ds: xr.Dataset) -> dict[str, Any]:
    """Return the part of a Dataset's ``attrs`` that determines its features.

    Only the selected checkpoints are included; xarray leaves ``attrs`` unchanged by a selection.
    """
    values = as_values(ds.attrs)
    attrs = {name: values[name] for name in (*STORE_SPEC, TASK_FIELDS) if name in values}
    names = checkpoint_names(ds) if CHECKPOINT in ds.coords else []
    # Unfitted features have no `fit`. An attr that lacks one of the names stays as it is, for the
    # comparison to find.
    for field in BY_CHECKPOINT:
        if set(names) <= set(attrs.get(field, ())):
            attrs[field] = {name: attrs[field][name] for name in names}
    return attrs


def as_text(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Return attrs as netCDF stores them: mappings and lists of texts as JSON, and no None.

    Examples
    --------
    >>> as_text({"projector": {"seed": 0}, "estimator": "trak", "chosen_by": None, "of": ["a"]})
    {'projector': '{"seed": 0}', 'estimator': 'trak', 'of': '["a"]'}
    """
    texts: dict[str, Any] = {}
    for name, value in attrs.items():
        # A list of numbers is an array to netCDF; netCDF 3 has no arrays of texts.
        is_list = isinstance(value, list) and value and isinstance(value[0], str)
        if isinstance(value, Mapping) or is_list:
            texts[name] = json.dumps(value)
        elif value is not None:
            texts[name] = int(value) if isinstance(value, bool) else value
    return texts


def pooled_checkpoints(attrs: Mapping[str, Any]) -> list[str]:
    """Return the checkpoints over which something was pooled: a list in stores, else JSON text."""
    names = attrs.get("pooled_checkpoints", [])
    return json.loads(names) if isinstance(names, str) else list(names)


def as_values(attrs: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return attrs with the mappings that :func:`as_text` wrote as JSON text.

    Examples
    --------
    >>> as_values({"projector": '{"seed": 0}', "formula": "{z}"})
    {'projector': {'seed': 0}, 'formula': '{z}'}
    """
    values = dict(attrs)
    for name, text in attrs.items():
        if isinstance(text, str) and text.startswith("{"):
            # A text in braces that nobody wrote as JSON stays a text, such as a formula.
            with contextlib.suppress(ValueError):
                values[name] = json.loads(text)
    return values


def digest(values: Mapping[str, Any]) -> str:
    """Hash plain JSON values; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def require_same(
    actual: Mapping[str, Any],
    expected: Mapping[str, Any],
    *,
    what: str,
    names: tuple[str, ...] = FEATURE_SPEC,
) -> None:
    """Check that two specs agree.

    Raises
    ------
    StoreMismatchError
        At the first difference. The message names the field and shows both values.
    """
    for name in names:
        got, wanted = actual.get(name), expected.get(name)
        if name == "code":
            # The digests that both have: of code that the same version of Python has compiled.
            got, wanted = got or {}, wanted or {}
            is_same_python = got.get("python") == wanted.get("python")
            both = [key for key in wanted if key in got and is_same_python]
            got, wanted = ({key: x[key] for key in both} for x in (got, wanted))
        if _plain(got) == _plain(wanted):
            continue
        if name == "task" and TASK_FIELDS in actual and TASK_FIELDS in expected:
            # Options that a later version has added are None, or not there.
            got, wanted = _settings(actual[TASK_FIELDS]), _settings(expected[TASK_FIELDS])
            if _plain(got) == _plain(wanted):
                continue
        # Which names differ says more than the first checkpoint that one side lacks.
        if name in BY_CHECKPOINT and {*(got or ())} != {*(wanted or ())}:
            key, got, wanted = " (their names)", list(got or ()), list(wanted or ())
        else:
            key, got, wanted = _first_difference(got, wanted)
        raise StoreMismatchError(
            f"{what} differ in {name}{key}: expected {shown(wanted)}, got {shown(got)}; "
            f"try {_REMEDY.get(name, f'the same {name} for both')}"
        )


def _first_difference(actual: Any, expected: Any) -> tuple[str, Any, Any]:
    """Return the key at which two mappings differ first, and both values there."""
    if not isinstance(actual, Mapping) or not isinstance(expected, Mapping):
        return "", actual, expected
    for key in dict.fromkeys((*expected, *actual)):
        if _plain(actual.get(key)) != _plain(expected.get(key)):
            return f"[{key!r}]", actual.get(key), expected.get(key)
    return " (their order)", list(actual), list(expected)


def _settings(task: Any) -> Any:
    """Return the class and the settings of a task, but for those that are None.

    Names of variables come last, since they are never the only difference.
    """
    if not isinstance(task, Mapping):
        return task
    fields, names = task["fields"], task["names"]
    order = sorted(fields, key=lambda name: name in names)
    settings = {name: _settings(fields[name]) for name in order if fields[name] is not None}
    return {"class": task["class"], **settings}


def _plain(value: Any) -> Any:
    """Return a value as JSON text, in which a tuple equals the list that a store returns for it."""
    return json.dumps(value, default=repr)


def require_comparable(features: xr.Dataset, other: xr.Dataset, name: str = "target") -> None:
    """Reject features that were made differently or from other checkpoints.

    The names of a task's input variables do not matter: features of one token of a sequence
    (``CausalLM(position=...)``) are comparable with features of whole sequences. Gradients computed
    in different precisions differ by rounding error, which causes a warning once per process.

    Raises
    ------
    StoreMismatchError
        At the first difference between the two.
    """
    what = f"{name} and training features"
    ours, theirs = (
        spec(ds) | {CHECKPOINT: checkpoint_names(ds), PROJ_DIM: ds.sizes[PROJ_DIM]}
        for ds in (features, other)
    )
    if COLUMN in features.coords and COLUMN in other.coords:
        ours[COLUMN], theirs[COLUMN] = (ds[COLUMN].values.tolist() for ds in (features, other))
    # 1. The text of a task has the names of its variables, which may differ.
    tasks = [_plain(_defining(attrs.get(TASK_FIELDS))) for attrs in (theirs, ours)]
    if TASK_FIELDS in ours and tasks[0] == tasks[1]:
        theirs["task"] = ours["task"]
    require_same(theirs, ours, what=what, names=(*FEATURE_SPEC, CHECKPOINT, PROJ_DIM, COLUMN))
    both = [name for name in PRECISION if name in ours and name in theirs]
    if different := [name for name in both if ours[name] != theirs[name]]:
        values = ", ".join(f"{name} {ours[name]!r} and {theirs[name]!r}" for name in different)
        warn_once(
            ("precision", *different),
            f"expected {what} computed in the same precision, got {values} (training features "
            "first), so that their products carry the rounding error of the lower precision; try "
            "featurizing both with the same dtype=, torch.autocast and "
            "torch.set_float32_matmul_precision",
        )


def _defining(task: Any) -> Any:
    """Return what of a task determines gradients: all but the names of input variables."""
    if not isinstance(task, Mapping):
        return task
    fields, names = task["fields"], task["names"]
    others = {key: _defining(value) for key, value in fields.items() if key not in names}
    if "inputs" in names:
        # Inputs that are passed in order may have any names; and without a mask nothing is padded,
        # as with a mask of ones.
        named = [name for name in fields.get("inputs", ()) if name != "attention_mask"]
        others["inputs"] = len(fields["inputs"]) if fields.get("positional") else named
    kept = {key: value for key, value in sorted(others.items()) if value is not None}
    return {"class": task["class"], **kept}
