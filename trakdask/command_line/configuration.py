"""Configuration files: read, changed by ``--set``, and kept beside what a job wrote."""

from __future__ import annotations

import difflib
import inspect
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from trakdask._version import __version__
from trakdask.checks import shown
from trakdask.files import Folder, location

__all__ = [
    "FOLDER",
    "SECTIONS",
    "Configuration",
    "ConfigurationError",
    "example",
    "keep",
    "read",
    "require_key",
    "require_known_options",
    "require_not_kept_by_others",
    "section",
]

Configuration = Mapping[str, Any]

FOLDER = "folder"
"""The section to which relative paths refer; by default the folder of the file."""

SECTIONS = (
    *("data", "targets", "model", "projector", "featurize", "save", "stores", "cluster"),
    *("score", "top_k", "groups", "outputs", FOLDER),
)
_HEAD = "# By trakdask"
_SECRETS = "storage_options"
"""What is never kept: it may contain passwords."""


class ConfigurationError(ValueError):
    """A configuration file, or a command, that cannot be understood."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads 1e-3 as a number, as YAML 1.2 does and PyYAML does not; refuses a key that is twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping; what PyYAML makes of a key that is there twice is the last value."""
        keys = [key.value for key, _ in node.value]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {twice[0]!r} is there twice", node.start_mark
            )
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), "-+0123456789"
)


def example() -> str:
    """Return the configuration file that ``trakdask init`` writes."""
    return files("trakdask.command_line").joinpath("example.yaml").read_text("utf-8")


def read(path: Path, settings: Iterable[str] = ()) -> Configuration:
    """Read a YAML or TOML file and apply settings such as ``"projector.proj_dim=512"``.

    Raises
    ------
    ConfigurationError
        If there is no such file, it cannot be parsed, or it has a section that does not exist.
    """
    values = _parsed(path)
    values.setdefault(FOLDER, str(path.absolute().parent))
    for setting in settings:
        _apply(values, setting)
    for name in values:
        require_key(name, SECTIONS, "the configuration")
    return values


def section(configuration: Configuration, name: str) -> dict[str, Any]:
    """Return a section, which is empty if it is not there.

    Raises
    ------
    ConfigurationError
        If it is not a mapping.
    """
    values = configuration.get(name)
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigurationError(
            f"expected options by name in the section {name!r}, got {shown(values)}; try the form "
            f"that `trakdask init` writes"
        )
    return dict(values)


def require_known_options(
    function: Callable[..., Any], options: Iterable[str], where: str, *given: str
) -> None:
    """Reject options that a function does not have, or that are not for users to give here.

    Raises
    ------
    ConfigurationError
        If there is one; the message says where it is.
    """
    accepted = [name for name in inspect.signature(function).parameters if name not in given]
    for name in options:
        require_key(name, accepted, where)


def require_key(name: object, accepted: Iterable[str], where: str) -> None:
    """Reject a name that is not one of those accepted, and suggest the nearest one.

    Raises
    ------
    ConfigurationError
        If it is not.
    """
    accepted = list(accepted)
    if name not in accepted:
        near = difflib.get_close_matches(str(name), accepted, n=1) or accepted[:1]
        raise ConfigurationError(
            f"expected one of {accepted} in {where}, got {name!r}; try "
            f"{near[0] if near else 'leaving it out'}"
        )


def keep(configuration: Configuration, written: str | os.PathLike[str]) -> None:
    """Write the configuration beside what a job wrote, so that the job can be repeated."""
    folder, name = _beside(written)
    head = f"{_HEAD} {__version__}: the same command with this file repeats the job.\n"
    text = yaml.safe_dump(_without_secrets(configuration), sort_keys=False, allow_unicode=True)
    folder.write(name, (head + text).encode())


def require_not_kept_by_others(written: str | os.PathLike[str]) -> None:
    """Reject a path beside which :func:`keep` would overwrite a file that it did not write.

    Raises
    ------
    ConfigurationError
        If there is such a file.
    """
    folder, name = _beside(written)
    with suppress(FileNotFoundError):
        if not folder.read(name).startswith(_HEAD.encode()):
            raise ConfigurationError(
                f"expected to write the configuration to {folder.url}/{name}, got a file there "
                f"that trakdask did not write; try renaming it, or another path than {written}"
            )


def _beside(written: str | os.PathLike[str]) -> tuple[Folder, str]:
    parent, _, name = location(written).rpartition("/")
    return Folder.at(parent), f"{name}.yaml"


def _without_secrets(values: Any) -> Any:
    if not isinstance(values, Mapping):
        return values
    return {key: _without_secrets(value) for key, value in values.items() if key != _SECRETS}


def _parsed(path: Path) -> dict[str, Any]:
    toml = path.suffix.lower() == ".toml"
    try:
        text = path.read_text("utf-8")
        values = tomllib.loads(text) if toml else yaml.load(text, _Loader)
    except OSError as err:
        raise ConfigurationError(
            f"expected a configuration file, got {str(path)!r} ({err.strerror}); try `trakdask "
            "init`, which writes one"
        ) from err
    except (ValueError, yaml.YAMLError) as err:
        raise ConfigurationError(
            f"expected a file in {'TOML' if toml else 'YAML'}, got {str(path)!r}, which cannot be "
            f"parsed: {' '.join(str(err).split())}; try the form that `trakdask init` writes"
        ) from err
    if not isinstance(values, dict):
        raise ConfigurationError(
            f"expected the sections {list(SECTIONS)} in {str(path)!r}, got {shown(values)}; try "
            "the form that `trakdask init` writes"
        )
    return values


def _apply(values: dict[str, Any], setting: str) -> None:
    """Set one value by its path; what follows the = is read as YAML."""
    path, sign, text = setting.partition("=")
    *parents, last = path.strip().split(".")
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError:
        sign = ""
    if not sign or not all((*parents, last)):
        raise ConfigurationError(
            f"expected --set section.key=value, got {setting!r}; try --set projector.proj_dim=512"
        )
    for name in parents:
        child = values.setdefault(name, {})
        if child is None:
            child = values[name] = {}
        if not isinstance(child, dict):
            raise ConfigurationError(
                f"expected a section named {name!r} for --set {setting}, got {shown(child)}; try "
                f"--set {path.partition('.')[0]}=value"
            )
        values = child
    values[last] = value
