"""Configuration files: read, changed by ``--set``, and kept beside the results of a job."""

from __future__ import annotations

import inspect
import itertools
import math
import os
import re
import tomllib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from trakdask._version import __version__
from trakdask.checks import require_choice, shown
from trakdask.files import Folder, location

_SECTIONS = (
    *("data", "targets", "model", "projector", "featurize", "save"),
    *("stores", "cluster", "score", "top_k", "evaluate", "outputs"),
)
_KEYS = {"stores": ("train", "targets"), "outputs": ("top_k",)}
"""The keys of sections that are no arguments of a function, which would check them."""
_FOLDER = "folder"
_HEAD = "# By trakdask"
_SECRETS = "storage_options"
"""A key that is never kept, because it may contain passwords."""


class ConfigurationError(ValueError):
    """A configuration file, or a command, that cannot be understood."""


_REMEDY = re.compile(r"; (?=(?:try|see) )")
"""What separates the two halves of our messages, ``"expected …, got …; try …"``."""


def in_two_lines(err: BaseException, remedy: str) -> str:
    """Return what an error says, and in a second line what to try; a remedy of its own goes first.

    Examples
    --------
    >>> print(in_two_lines(ValueError("expected k >= 1, got 0; try k=10"), "see the manual"))
    expected k >= 1, got 0
    Try k=10
    >>> print(in_two_lines(FileNotFoundError(2, "No such file", "a.csv"), "try another path"))
    No such file: a.csv
    Try another path
    """
    text = str(err)
    if isinstance(err, OSError) and err.filename is not None:  # its own text is "[Errno 2] ..."
        text = f"{err.strerror}: {err.filename}"
    elif isinstance(err, KeyError):  # its own text is a repr
        text = str(err.args[0]) if err.args else ""
    # A remedy of its own goes first.
    fact, remedy, *_ = *_REMEDY.split(text or f"{type(err).__name__} without a message", 1), remedy
    # Messages of parsers and of torch have several lines.
    return f"{' '.join(fact.split())}\n{remedy[:1].upper()}{' '.join(remedy[1:].split())}"


_OF_PATHS = "try another path; relative ones start at the folder of the configuration"


@contextmanager
def about(place: str, remedy: str = "") -> Iterator[None]:
    """Say which part of a job an error is about. Nothing was computed when it is raised.

    Parameters
    ----------
    place
        The part, as a user would call it.
    remedy
        What to try where the error does not say it, as errors of other libraries do not.

    Raises
    ------
    ConfigurationError
        In place of an error of a parser or of the library about a value.
    """
    try:
        yield
    except ConfigurationError:
        raise
    except (
        *(TypeError, ValueError, LookupError, ImportError, OSError),
        *(RecursionError, yaml.YAMLError),
    ) as err:
        general = _OF_PATHS if isinstance(err, OSError) else "see `trakdask init` for an example"
        raise ConfigurationError(f"in {place}: {in_two_lines(err, remedy or general)}") from err


def require_keys(
    options: Mapping[str, Any], function: Callable[..., Any], n_given: int = 0, *more: str
) -> None:
    """Require that options are the arguments of a function after the first ones, or others.

    Raises
    ------
    ValueError
        If one is not, or one is missing; the message has the name that is nearest.
    """
    parameters = [*inspect.signature(function).parameters.values()][n_given:]
    named = [each for each in parameters if each.kind is not each.VAR_KEYWORD]
    names = [*(each.name for each in named), *more]
    # A function that takes any keyword passes them on to one that checks them.
    is_checked_there = len(named) < len(parameters) and not more
    for name in () if is_checked_there else options:
        require_choice("a key", name, names, remedy="see `trakdask init`")
    missing = [each.name for each in named if each.default is each.empty]
    if missing := [name for name in missing if name not in options]:
        raise ValueError(f"expected the key {missing[0]!r}, got {[*options]}; see `trakdask init`")


_FORMS = {str: "text", int: "an integer", list: "a list", dict: "values by name"}


def require_form(key: str, value: object, *forms: type, remedy: str) -> None:
    """Require that the value of a key has one of some types, such as ``str`` or ``dict``.

    Raises
    ------
    TypeError
        If it has not; the message names the key, and the right form.
    """
    # YAML reads "yes" as true, which is an integer to Python.
    if not isinstance(value, forms) or isinstance(value, bool):
        words = " or ".join(_FORMS[form] for form in forms)
        raise TypeError(f"expected {words} as {key}, got {shown(value)}; try {remedy}")


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads 1e-3 as a number, as YAML 1.2 does and PyYAML does not; refuses a key that is twice."""

    def construct_document(self, node: yaml.Node) -> Any:
        """Return the content, unless aliases and merges make it much larger than it looks."""
        # Before it is made: ten aliases of ten aliases, a few levels deep, would fill the memory.
        if (size := _size(node, {})) > _MOST_VALUES:
            raise yaml.constructor.ConstructorError(
                None, None, f"expected at most {_MOST_VALUES:,} values, with each alias written "
                f"out, got {min(size, 10**12):,} or more", node.start_mark,
            )  # fmt: skip
        return super().construct_document(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping; PyYAML would take the last value of a key that is there twice."""
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if keys and keys.most_common(1)[0][1] > 1:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {keys.most_common(1)[0][0]!r} is there twice", node.start_mark
            )
        return super().construct_mapping(node, deep)


_MOST_VALUES = 1_000_000


def _size(node: yaml.Node, sizes: dict[yaml.Node, float]) -> float:
    """Return how many values a node has, each alias written out; infinity within itself."""
    if node not in sizes:
        # Until all of its parts are counted: whoever meets it before that is inside of it.
        sizes[node] = math.inf
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        flat = itertools.chain(*parts) if isinstance(node, yaml.MappingNode) else parts
        sizes[node] = 1 + sum(_size(part, sizes) for part in flat)
    return sizes[node]


# PyYAML follows YAML 1.1, where a number with an exponent needs a point, and 1e-3 is a text.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), "-+0123456789"
)


def read(path: Path, settings: Iterable[str] = ()) -> Mapping[str, Any]:
    """Read a YAML or TOML file and apply settings such as ``"projector.proj_dim=512"``.

    Raises
    ------
    ConfigurationError
        If there is no such file, it cannot be parsed, or it has a section that does not exist.
    """
    with about(str(path)):
        text = path.read_text("utf-8")
        parsed = tomllib.loads(text) if path.suffix.lower() == ".toml" else yaml.load(text, _Loader)
        if not isinstance(parsed, dict):
            raise TypeError(
                f"expected sections such as data and model, got {shown(parsed)}; see `trakdask "
                "init`"
            )
        # A file that `keep` wrote beside a result says in which folder the job was.
        values = {_FOLDER: str(path.absolute().parent), **parsed}
        if (moved := _moved_folder(path.absolute(), parsed)) is not None:
            values[_FOLDER] = moved
    for setting in settings:
        with about(f"--set {setting}"):
            _apply(values, setting)
    with about("the configuration"):
        for name, options in values.items():
            require_choice("a section", name, (*_SECTIONS, _FOLDER), remedy="see `trakdask init`")
            if name != _FOLDER and not isinstance(options, dict | None):
                raise TypeError(f"expected options by name in {name!r}, got {shown(options)}")
            for key in (options or ()) if name in _KEYS else ():
                require_choice(f"a key of {name}", key, _KEYS[name], remedy="see `trakdask init`")
    return {n: options for n, options in values.items() if options is not None or n == _FOLDER}


def _moved_folder(path: Path, values: Mapping[str, Any]) -> str | None:
    """Return the folder of a file that :func:`keep` wrote, if it was moved with its result."""
    sections = (values.get(name) for name in _KEYS)
    results = [r for s in sections if isinstance(s, dict) for r in s.values() if isinstance(r, str)]
    for result in map(Path, results):
        # Its result is at the same relative path from the new folder as from the old one.
        if _FOLDER in values and path.name == f"{result.name}.yaml" and not result.is_absolute():
            folder = path.parents[len(result.parts) - 1]
            if (folder / result).exists():
                return str(folder)
    return None


def _apply(values: dict[str, Any], setting: str) -> None:
    """Set one value by its path; the text after the = is read as YAML."""
    path, sign, text = setting.partition("=")
    if not sign:
        raise ValueError("expected section.key=value; try --set projector.proj_dim=512")
    *parents, last = path.strip().split(".")
    for name in parents:
        if not isinstance(values.get(name), dict):  # a section may be there without options
            values[name] = {}
        values = values[name]
    values[last] = yaml.load(text, _Loader)


def section(configuration: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a copy of a section, which is empty if it is not there."""
    return dict(configuration.get(name) or {})


def keep(configuration: Mapping[str, Any], written: str | os.PathLike[str]) -> None:
    """Write the configuration beside a result of a job, so that the job can be repeated.

    A file that trakdask did not write stays there, with a warning.
    """
    folder, name = _beside(written)
    if name in folder.names() and kept(written) is None:
        warnings.warn(
            f"expected to write the configuration to {folder.url}/{name}, got a file there that "
            "trakdask did not write; try renaming it",
            stacklevel=2,
        )
        return
    # By its head a later call knows the file as one that it may replace.
    head = f"{_HEAD} {__version__}: the same command with this file repeats the job.\n"
    text = yaml.safe_dump(_without_secrets(configuration), sort_keys=False, allow_unicode=True)
    folder.write(name, (head + text).encode())


def kept(written: str | os.PathLike[str]) -> str | None:
    """Return the file that :func:`keep` wrote beside something; None if there is none."""
    folder, name = _beside(written)
    with suppress(FileNotFoundError):
        if folder.read(name).startswith(_HEAD.encode()):
            return f"{folder.url}/{name}"
    return None


def _beside(written: str | os.PathLike[str]) -> tuple[Folder, str]:
    parent, _, name = location(written).rpartition("/")
    return Folder.at(parent), f"{name}.yaml"


def _without_secrets(values: Any) -> Any:
    if not isinstance(values, Mapping):
        return values
    return {key: _without_secrets(value) for key, value in values.items() if key != _SECRETS}
