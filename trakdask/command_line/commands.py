"""The commands of ``trakdask``."""

from __future__ import annotations

import atexit
import os
import shlex
import sys
import warnings
import webbrowser
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Argument, Option

import trakdask as td
from trakdask import command_line as cli
from trakdask.checks import import_callable
from trakdask.command_line.configuration import ConfigurationError, about, in_two_lines, kept, read
from trakdask.files import location

app = typer.Typer(
    help="TRAK data attribution from a configuration file. Start with: trakdask init",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


# Names and texts of users may look like markup, [bold], or emoji, :on:.
output = Console(markup=False, emoji=False)
errors = Console(stderr=True, markup=False, emoji=False)

_INTERRUPTED = 130
"""The exit code after Ctrl-C, as of every command of a shell."""

_NAME = "package.module:function"
_SAMPLES = f"A zarr store, or {_NAME} that returns a Dataset, or two: training samples, targets."

_REMEDY = "see where it happened with --debug; what is computed is kept, and the same line goes on"
_REMEDIES = {
    "botocore": "try endpoint_url, key and secret in the storage_options of the section, or "
    "AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment"
}
"""What to try after an error of another package, by the name of the package."""

File = Annotated[Path, Argument(help="A configuration in YAML or TOML; see `trakdask init`.")]
Settings = Annotated[
    list[str] | None,
    Option("--set", metavar="KEY.PATH=VALUE", help="Change a value of the configuration."),
]
Debug = Annotated[bool, Option("--debug", help="Show the traceback of an error.")]


@app.command()
def init(
    file: Annotated[Path, Argument(help="Where to write it.")] = Path("trakdask.yaml"),
    debug: Debug = False,
) -> None:
    """Write an example of a configuration, with comments, that works as it stands."""
    text = files("trakdask.command_line").joinpath("example.yaml").read_text("utf-8")
    with _reported(debug):
        # "x" never overwrites a file.
        with about("init"), file.open("x", encoding="utf-8") as new:
            new.write(text)
        _say(f"{file} is written")
        _say_next("Rank the training samples", "top-k", file)


@app.command()
def plan(
    file: File,
    settings: Settings = None,
    pilot: Annotated[bool, Option(help="Measure time and memory of two blocks.")] = False,
    debug: Debug = False,
) -> None:
    """Print the cost of the features, before anything runs."""
    with _job(file, settings, debug) as values:
        described = cli.jobs.features(values, "data", fits=False)
        fitted = values.get("projector") or {}
        options = {"n_fitted": fitted["n_samples"]} if "n_samples" in fitted else {}
        output.print(td.plan(described, pilot=pilot, **options))
        _say_next("Compute the features", "featurize", file, settings)


@app.command()
def featurize(file: File, settings: Settings = None, debug: Debug = False) -> None:
    """Fit the projector, and compute the features that the stores lack."""
    with _job(file, settings, debug) as values:
        # Training samples are needed in any case, if only from their store; targets may come later.
        names = [name for name in ("data", "targets") if name in values or name == "data"]
        both = cli.jobs.described_or_stored(values, names)
        for name, features in cli.jobs.saved(values, both).items():
            _say(cli.results.brief(features, location(values["stores"][cli.jobs.STORES[name]])))
        _say_next("Rank the training samples", "top-k", file, settings)


@app.command()
def top_k(file: File, settings: Settings = None, debug: Debug = False) -> None:
    """Rank the training samples of each target; print the first targets, write all."""
    with _job(file, settings, debug) as values:
        ranking, path = cli.results.ranking(values)
        output.print(cli.results.first_targets(ranking))
        if path is not None:
            _say(f"{path} is written")
        # With --set, the file alone is another job; the one that was kept has the settings.
        job = kept(values["stores"]["train"]) if settings else file
        _say_next("Look at it in a browser", "explore", job or file)


@app.command()
def evaluate(file: File, settings: Settings = None, debug: Debug = False) -> None:
    """Say how well the scores predict models that were trained on parts of the samples."""
    with _job(file, settings, debug) as values:
        for sentence in cli.results.evaluated(values):
            _say(sentence)


@app.command()
def verify(
    store: Annotated[str, Argument(help="Folder or URL of a store of features.")],
    checksums: Annotated[bool, Option(help="Read every chunk.")] = False,
    repair: Annotated[bool, Option(help="Remove what cannot be read.")] = False,
    debug: Debug = False,
) -> None:
    """Look for chunks that are lost or damaged; the exit code is 1 if there are any."""
    with _reported(debug):
        faults = td.verify(store, checksums=checksums, repair=repair)
        if not len(faults):
            return _say(f"{store}: no fault was found")
        output.print(cli.results.table(faults, f"{len(faults)} faults of {store}"))
        raise typer.Exit(1)


@app.command()
def explore(
    store: Annotated[str, Argument(help="A store of features, or a configuration.")],
    targets: Annotated[str | None, Argument(help="The store of features of targets.")] = None,
    samples: Annotated[str | None, Option(help=_SAMPLES)] = None,
    marks: Annotated[str | None, Option(help="File or URL; by default beside the store.")] = None,
    model: Annotated[str | None, Option(help=f"{_NAME} that returns a td.Model.")] = None,
    tokenizer: Annotated[str | None, Option(help=f"{_NAME} from a text to inputs.")] = None,
    preprocess: Annotated[str | None, Option(help=f"{_NAME} from an image to the input.")] = None,
    text: Annotated[str | None, Option(help=f"{_NAME} from a token to text; a tokenizer.")] = None,
    view: Annotated[str, Option(help="What an address of the explorer has after the ?.")] = "",
    save: Annotated[Path | None, Option(help="Write the view as HTML, and serve nothing.")] = None,
    cluster: Annotated[str | None, Option(help="Scheduler of Dask; else threads.")] = None,
    host: Annotated[str, Option(help="0.0.0.0 lets other machines connect.")] = "127.0.0.1",
    port: Annotated[int, Option(help="0 takes a free one.")] = 0,
    open_browser: Annotated[bool, Option("--open", help="Also open the address.")] = False,
    debug: Debug = False,
) -> None:
    """Look at attributions in a browser: prints the address, and serves it until Ctrl-C.

    With a configuration, features that are missing are computed first, and its samples and its
    model are used.
    """
    from trakdask.explorer import Marks  # takes seconds to import

    with ExitStack() as stack:
        stack.enter_context(_reported(debug))
        stores = {"train": store, "targets": targets}
        job: dict[str, Any] = {"folder": os.getcwd(), "stores": stores}
        if Path(store).suffix in (".yaml", ".yml", ".toml"):
            job = dict(read(Path(store)))
        elif targets is None:
            raise ConfigurationError(
                "explore needs two stores, or a configuration\nTry trakdask explore train.zarr "
                "targets.zarr, or trakdask explore trakdask.yaml"
            )
        if cluster is not None:
            job["cluster"] = {"address": cluster}
        stack.enter_context(cli.jobs.running(job))
        store, features, target_features, options = cli.jobs.explored(job, samples)
        given = {"model": model, "tokenizer": tokenizer, "preprocess": preprocess, "text": text}
        # What is typed goes before what the configuration describes.
        for name, path in given.items():
            if path is not None:
                with about(f"--{name} {path}"):
                    options[name] = import_callable(path, f"--{name}")
        # A tokenizer also knows the text of a token.
        if hasattr(options.get("tokenizer"), "decode"):
            options.setdefault("text", options["tokenizer"])
        if model is not None:
            options["model"] = options["model"]()
        kept = Marks.beside(store) if marks is None else Marks(marks, store=store)
        explorer = td.explore(features, target_features, marks=kept, **options)
        # Checked before a server starts or a file is written.
        with about("--view"):
            shown = explorer.checked(view)
        if save is not None:
            explorer.save_html(save, shown)
            return _say(f"{save} is written")
        query = f"?{shown.to_query()}" if view else ""

        def announce(url: str) -> None:
            _say(f"{url}{query}")
            if open_browser:
                webbrowser.open(f"{url}{query}")

        explorer.serve(host=host, port=port, announce=announce)


def _say(text: str) -> None:
    output.print(text, soft_wrap=True)


def _say_next(aim: str, command: str, file: str | Path, settings: list[str] | None = None) -> None:
    """Print the line to type next, with the settings of this one."""
    line = ["trakdask", command, str(file), *(f"--set={setting}" for setting in settings or [])]
    _say(f"{aim}: {shlex.join(line)}")


@contextmanager
def _job(file: Path, settings: list[str] | None, debug: bool) -> Iterator[Mapping[str, Any]]:
    with _reported(debug):
        values = read(file, settings or [])
        with cli.jobs.running(values):
            yield values


@contextmanager
def _reported(debug: bool) -> Iterator[None]:
    """Turn an error into a message and an exit code: 2 for the configuration, 1 for the job."""
    try:
        with warnings.catch_warnings():
            # `catch_warnings` restores this function, too.
            warnings.showwarning = _show_warning
            yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt:
        errors.print("Stopped. The same line goes on with what is not done yet.", soft_wrap=True)
        raise typer.Exit(_INTERRUPTED) from None
    except Exception as err:
        if debug:
            raise
        text, code = f"Configuration error: {err}", 2  # which are two lines already
        if not isinstance(err, ConfigurationError):
            package = type(err).__module__.partition(".")[0]
            text, code = f"Job error: {in_two_lines(err, _REMEDIES.get(package, _REMEDY))}", 1
        errors.print(text, style="red", soft_wrap=True)
        # Of requests on a network that the process leaves unfinished, Python prints tracebacks.
        atexit.register(setattr, sys, "unraisablehook", lambda _: None)
        raise typer.Exit(code) from None


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    errors.print(f"Warning: {message}", style="yellow", soft_wrap=True)
