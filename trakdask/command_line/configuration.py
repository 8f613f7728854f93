"""Configuration files: read, changed by ``--set``, and kept beside what a job wrote."""

from __future__ import annotations

import difflib
import inspect
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
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
    "named_options",
    "read",
    "require_key",
    "section",
]

Configuration = Mapping[str, Any]

FOLDER = "folder"
"""The section to which relative paths refer; by default the folder of the file."""

SECTIONS = (
    *("data", "targets", "model", "projector", "featurize", "save", "stores", "cluster"),
    *("score", "top_k", "groups", "outputs", FOLDER),
)
_SECRETS = "storage_options"
"""What is never kept: it may contain passwords."""


class ConfigurationError(ValueError):
    """A configuration file, or a command, that cannot be understood."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads 1e-3 as a number, as YAML 1.2 does and PyYAML does not."""


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


def named_options(
    function: Callable[..., Any], options: Mapping[str, Any], where: str, *given: str
) -> dict[str, Any]:
    """Return the options of a function, after a comparison with its signature.

    Parameters
    ----------
    function
        The function that will be called.
    options
        Its options by name.
    where
        The section in which they are, for messages.
    given
        Names of the parameters that are not for users to give here.

    Raises
    ------
    ConfigurationError
        If there is no such option, or one without a default is missing.
    """
    parameters = inspect.signature(function).parameters
    accepted = [name for name in parameters if name not in given]
    for name in options:
        require_key(name, accepted, where)
    for name in accepted:
        if parameters[name].default is inspect.Parameter.empty and name not in options:
            raise ConfigurationError(
                f"expected {name!r} in {where}, got {sorted(options)}; try adding {name}: ... to it"
            )
    return dict(options)


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
    parent, _, name = location(written).rpartition("/")
    head = f"# By trakdask {__version__}: the same command with this file repeats the job.\n"
    text = yaml.safe_dump(_without_secrets(configuration), sort_keys=False, allow_unicode=True)
    Folder.at(parent).write(f"{name}.yaml", (head + text).encode())


def _without_secrets(values: Any) -> Any:
    if not isinstance(values, Mapping):
        return values
    return {key: _without_secrets(value) for key, value in values.items() if key != _SECRETS}


def _parsed(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text("utf-8")
        toml = path.suffix.lower() == ".toml"
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
