"""Bad inputs of plots.*, examples.* and testing.*."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import xarray as xr

import trakdask as td
from tests.bad_inputs.bad_input import BadInput, check, parametrize

IMAGES = np.zeros((16, 4, 4))
PIXELS = np.zeros((6, 1, 8, 8), np.float32)
LABELS = np.array([0, 1, 2, 3, 4, 9])


@functools.cache
def scores() -> xr.DataArray:
    features = td.testing.simulate_features(n_samples=16, proj_dim=4)
    return td.score(features, features.isel(sample=slice(4)))


@functools.cache
def results() -> dict[str, xr.Dataset]:
    """Return what every plot function is for, under the name of the plot."""

    def train(positions: np.ndarray, seed: int) -> np.ndarray:
        return scores().values[positions].sum(axis=0)

    masks = td.evaluate.subsets(scores(), 8)
    outputs = xr.dot(masks, scores(), dim="sample")
    one = td.testing.simulate_features(20, 4, 1), td.testing.simulate_features(20, 4, 1, seed=1)
    return {
        "gallery": td.top_k(scores(), 3).compute(),
        "lds": td.evaluate.lds(scores(), masks, outputs, resamples=2).compute(),
        "removal_curve": td.evaluate.removal_curve(train, scores(), [0.2]).compute(),
        "brittleness": td.evaluate.brittleness(train, scores(), [2]).compute(),
        "features": one[0],
        "damping": td.damping(one[0], damping=td.Absolute(1.0)),
        **checks(),
    }


def checks() -> dict[str, xr.Dataset]:
    labelled = scores().assign_coords(
        label=("sample", np.arange(16) % 2),
        target_label=("target", np.arange(4) % 2),
        marked=("sample", np.arange(16) < 4),
        target_marked=("target", [True, True, False, False]),
    )
    of_two = xr.concat([scores(), -scores()], "run")
    made = {
        "class_detection": td.evaluate.class_detection(labelled, resamples=2),
        "shortcut_detection": td.evaluate.shortcut_detection(labelled, "marked", resamples=2),
        "mislabelled_curve": td.evaluate.mislabelled_curve(scores()[:, 0], np.arange(16) < 4),
        "randomization_check": td.evaluate.randomization_check(scores(), -scores(), resamples=2),
        "seed_agreement": td.evaluate.seed_agreement(of_two, "run", resamples=2),
    }
    return {name: result.compute() for name, result in made.items()}


def gallery(**changed: object) -> object:
    top = results()["gallery"]
    given = {"helpful": top, "harmful": top, "images": IMAGES, "target_images": IMAGES, **changed}
    return td.plots.gallery(**given)


def of_another(plot: str, missing: str) -> list[BadInput]:
    """Return the rows of a plot function that is given what is for others, or no result at all."""
    draw: Callable[[object], object] = getattr(td.plots, plot)
    others = ("gallery", "lds", "removal_curve", "brittleness", "features", "damping")
    return [
        *(
            BadInput(
                f"plots.{plot}",
                f"given what is for {other}",
                lambda _, other=other: draw(results()[other]),
                ValueError,
                [repr(missing), "try"],
            )
            for other in others
            if other != plot
        ),
        BadInput(f"plots.{plot}", "scores", lambda _: draw(scores()), TypeError, ["DataArray"]),
        BadInput(f"plots.{plot}", "None", lambda _: draw(None), TypeError, ["NoneType"]),
        BadInput(f"plots.{plot}", "numbers", lambda _: draw([0.1, 0.2]), TypeError, ["list"]),
    ]


def both(name: str) -> Callable[[Path], object]:
    return lambda _: gallery(helpful=results()[name], harmful=results()[name])


def gallery_row(
    case: str, changed: dict[str, object], error: type[Exception], words: list[str]
) -> BadInput:
    return BadInput("plots.gallery", case, lambda _: gallery(**changed), error, words)


PLOTS = [
    *of_another("lds", "lds"),
    *of_another("removal_curve", "mean_full_output"),
    *of_another("damping", "curve"),
    *of_another("class_detection", "precision_mean"),
    *of_another("shortcut_detection", "auprc"),
    *of_another("mislabelled_curve", "found"),
    *of_another("randomization_check", "correlation"),
    *of_another("seed_agreement", "reliability"),
    BadInput(
        "plots.class_detection",
        "of several kinds of scores",
        lambda _: td.plots.class_detection(results()["class_detection"].expand_dims(estimator=2)),
        ValueError,
        ["'precision_mean'", "'estimator'", "sel(estimator="],
    ),
    BadInput(
        "plots.shortcut_detection",
        "without the marks of targets",
        lambda _: td.plots.shortcut_detection(
            results()["shortcut_detection"].drop_vars("target_marked")
        ),
        ValueError,
        ["'target_marked'", "shortcut_detection"],
    ),
    BadInput(
        "plots.mislabelled_curve",
        "of two further dimensions",
        lambda _: td.plots.mislabelled_curve(results()["mislabelled_curve"].expand_dims(a=2, b=2)),
        ValueError,
        ["'found'", "'a'", "'b'"],
    ),
    BadInput(
        "plots.randomization_check",
        "of several random models",
        lambda _: td.plots.randomization_check(results()["randomization_check"].expand_dims(run=2)),
        ValueError,
        ["'correlation'", "'run'", "one random model"],
    ),
    BadInput(
        "plots.seed_agreement",
        "no targets",
        lambda _: td.plots.seed_agreement(results()["seed_agreement"].isel(target=[])),
        ValueError,
        ["'agreement'", "(0,)"],
    ),
    BadInput(
        "plots.damping",
        "not chosen by outputs",
        lambda _: td.plots.damping(results()["damping"]),
        ValueError,
        ["curve", "'absolute'", "'completeness'"],
    ),
    BadInput(
        "plots.lds",
        "of several kinds of scores",
        lambda _: td.plots.lds(results()["lds"].expand_dims(estimator=2)),
        ValueError,
        ["'lds'", "'estimator'", "sel(estimator="],
    ),
    BadInput(
        "plots.lds",
        "no targets",
        lambda _: td.plots.lds(results()["lds"].isel(target=[])),
        ValueError,
        ["'lds'", "(0,)"],
    ),
    *(
        BadInput("plots.gallery", f"given what is for {name}", both(name), ValueError, ["'score'"])
        for name in ("lds", "removal_curve", "brittleness", "features", "damping")
    ),
    gallery_row("scores", {"helpful": 3}, TypeError, ["helpful", "int", "td.top_k"]),
    gallery_row("None", {"harmful": None}, TypeError, ["harmful", "NoneType"]),
    gallery_row("images are jagged", {"images": [[0], [1, 2]]}, TypeError, ["images", "list"]),
    gallery_row("no images", {"images": IMAGES[:0]}, ValueError, ["images", "(0, 4, 4)"]),
    gallery_row("empty images", {"images": IMAGES[:, :0]}, ValueError, ["images", "(16, 0, 4)"]),
    gallery_row("flat images", {"images": IMAGES[:, 0]}, ValueError, ["images", "(16, 4)"]),
    gallery_row(
        "two channels",
        {"images": np.zeros((16, 2, 4, 4))},
        ValueError,
        ["images", "(16, 2, 4, 4)", "(n, h, w, 3)"],
    ),
    gallery_row(
        "images are objects",
        {"target_images": IMAGES.astype(object)},
        ValueError,
        ["target_images", "object"],
    ),
    gallery_row("target images are None", {"target_images": None}, TypeError, ["target_images"]),
    gallery_row("too few images", {"images": IMAGES[:1]}, ValueError, ["images", "1", "sample"]),
    gallery_row("normalize is a number", {"normalize": 0.5}, ValueError, ["normalize", "0.5"]),
    gallery_row("no spread", {"normalize": (0.5, 0.0)}, ValueError, ["normalize", "(0.5, 0.0)"]),
    gallery_row(
        "normalize of colours for grey images",
        {"normalize": ((0.5,) * 3, (0.5,) * 3)},
        ValueError,
        ["normalize", "3", "grey"],
    ),
    gallery_row("no such colour map", {"cmap": "grai"}, ValueError, ["cmap", "'grai'"]),
    gallery_row("a number for targets", {"targets": 2}, TypeError, ["targets", "2"]),
    gallery_row("no targets", {"targets": []}, ValueError, ["targets", "[]"]),
    gallery_row("targets that are not there", {"targets": [0, 99]}, ValueError, ["[0, 4)", "99"]),
    gallery_row("negative target", {"targets": [-1]}, ValueError, ["[0, 4)", "-1"]),
    gallery_row("target 1.5", {"targets": [1.5]}, TypeError, ["target", "1.5"]),
    gallery_row("unknown label", {"label": "digit"}, ValueError, ["label", "'digit'", "'rank'"]),
    gallery_row("label is a list", {"label": ["label"]}, ValueError, ["label", "['label']"]),
    gallery_row("n_shown 0", {"n_shown": 0}, ValueError, ["n_shown", "0", "n_shown=5"]),
    gallery_row("n_shown -3", {"n_shown": -3}, ValueError, ["n_shown", "-3"]),
    gallery_row("n_shown 2.5", {"n_shown": 2.5}, TypeError, ["n_shown", "2.5"]),
    BadInput(
        "plots.gallery",
        "rankings of other targets",
        lambda _: gallery(harmful=results()["gallery"].isel(target=[0, 1])),
        ValueError,
        ["4", "2", "same targets"],
    ),
    BadInput(
        "plots.power_of_ten", "nothing", lambda _: td.plots.power_of_ten(), TypeError, ["None"]
    ),
    BadInput(
        "plots.power_of_ten", "a list", lambda _: td.plots.power_of_ten([1.0]), TypeError, ["[1.0]"]
    ),
    BadInput(
        "plots.power_of_ten",
        "texts",
        lambda _: td.plots.power_of_ten(xr.DataArray(["a"])),
        TypeError,
        ["<U1"],
    ),
]


def trained(**changed: object) -> object:
    mlp = td.examples.digits_mlp
    given = {"build": mlp, "images": PIXELS, "labels": LABELS, "seed": 0, "epochs": 1, **changed}
    return td.examples.train_classifier(**given)


def accuracy(**changed: object) -> object:
    mlp = td.examples.digits_mlp
    given = {"build": mlp, "state": mlp().state_dict(), "images": PIXELS, "labels": LABELS}
    return td.examples.classifier_accuracy(**{**given, **changed})


def checkpoints(path: Path, **changed: object) -> object:
    return td.examples.digits_checkpoints(**{"folder": path, "n_checkpoints": 1, **changed})


def on_data(name: str, call: Callable[..., object]) -> list[BadInput]:
    """Return the rows of a function that takes a model, images and labels."""
    cases: list[tuple[str, dict[str, object], type[Exception], list[str]]] = [
        (
            "build is a model",
            {"build": td.examples.digits_mlp()},
            TypeError,
            ["build", "Sequential"],
        ),
        ("build is a text", {"build": "mlp"}, TypeError, ["build", "'mlp'"]),
        ("build takes arguments", {"build": torch.nn.Linear}, TypeError, ["build", "Linear"]),
        ("build returns None", {"build": lambda: None}, TypeError, ["build", "None", "nn.Module"]),
        ("images are a list", {"images": [[0.0]]}, TypeError, ["images", "list"]),
        ("images are a tensor", {"images": torch.zeros(6, 64)}, TypeError, ["images", "Tensor"]),
        ("images are float64", {"images": PIXELS.astype(float)}, TypeError, ["images", "float64"]),
        ("images of other width", {"images": PIXELS[..., :7]}, ValueError, ["(6, 1, 8, 7)"]),
        (
            "a NaN",
            {"images": PIXELS + np.float32("nan")},
            ValueError,
            ["images", "NaN", "sample 0"],
        ),
        ("no images", {"images": PIXELS[:0], "labels": LABELS[:0]}, ValueError, ["(0, 1, 8, 8)"]),
        ("fewer labels", {"labels": LABELS[:5]}, ValueError, ["(6, 1, 8, 8)", "(5,)"]),
        ("labels are texts", {"labels": LABELS.astype(str)}, TypeError, ["labels", "<U"]),
        ("labels are int32", {"labels": LABELS.astype("i4")}, TypeError, ["labels", "int32"]),
        ("label 12 of 10", {"labels": LABELS + 3}, ValueError, ["0..9", "12", "sample 5"]),
        ("negative label", {"labels": LABELS - 1}, ValueError, ["0..9", "-1", "sample 0"]),
    ]
    return [
        BadInput(f"examples.{name}", case, lambda _, c=changed: call(**c), error, words)
        for case, changed, error, words in cases
    ]


EXAMPLES = [
    *on_data("train_classifier", trained),
    *on_data("classifier_accuracy", accuracy),
    *(
        BadInput("examples.train_classifier", case, lambda _, c=changed: trained(**c), error, words)
        for case, changed, error, words in (
            ("no logits", {"build": lambda: torch.nn.Flatten(0)}, ValueError, ["logits", "(64,)"]),
            ("seed 1.5", {"seed": 1.5}, TypeError, ["seed", "1.5"]),
            ("seed None", {"seed": None}, TypeError, ["seed", "None"]),
            ("no epochs", {"epochs": 0}, ValueError, ["epochs", "0", "12"]),
            ("batch_size 0", {"batch_size": 0}, ValueError, ["batch_size", "0", "64"]),
            ("batch_size auto", {"batch_size": "auto"}, TypeError, ["batch_size", "'auto'"]),
            ("lr is NaN", {"lr": float("nan")}, ValueError, ["lr", "nan"]),
            ("lr 0", {"lr": 0}, ValueError, ["lr", "0"]),
            ("lr is a text", {"lr": "1e-3"}, TypeError, ["lr", "'1e-3'"]),
        )
    ),
    *(
        BadInput(
            "examples.classifier_accuracy", case, lambda _, s=state: accuracy(state=s), error, words
        )
        for case, state, error, words in (
            ("state is a path", "c0.pt", TypeError, ["state", "'c0.pt'"]),
            ("state is a model", torch.nn.Linear(2, 2), TypeError, ["state", "Linear"]),
            ("state is empty", {}, ValueError, ["state dict", "1.weight"]),
            (
                "state of another model",
                torch.nn.Linear(2, 2).state_dict(),
                ValueError,
                ["1.weight"],
            ),
        )
    ),
    *(
        BadInput(
            f"examples.{name}",
            case,
            lambda _, n=name, c=changed: getattr(td.examples, n)(**c),
            error,
            words,
        )
        for name in ("digits", "digits_arrays")
        for case, changed, error, words in (
            ("no targets", {"n_target": 0}, ValueError, ["n_target", "0", "200"]),
            ("all targets", {"n_target": 1797}, ValueError, ["n_target", "1797"]),
            ("a share", {"n_target": 0.1}, TypeError, ["n_target", "0.1"]),
            ("seed 1.5", {"seed": 1.5}, TypeError, ["seed", "1.5"]),
            ("seed -1", {"seed": -1}, ValueError, ["seed", "-1"]),
        )
    ),
    BadInput(
        "examples.digits", "chunks 0", lambda _: td.examples.digits(chunks=0), ValueError, ["0"]
    ),
    BadInput(
        "examples.digits",
        "chunks auto",
        lambda _: td.examples.digits(chunks="auto"),
        TypeError,
        ["chunks", "'auto'"],
    ),
    *(
        BadInput(
            "examples.digits_checkpoints",
            case,
            lambda folder, c=changed: checkpoints(folder, **c),
            error,
            words,
        )
        for case, changed, error, words in (
            ("folder is None", {"folder": None}, TypeError, ["folder", "None"]),
            ("build is a text", {"build": "cnn"}, TypeError, ["build", "'cnn'"]),
            ("no checkpoints", {"n_checkpoints": 0}, ValueError, ["n_checkpoints", "0"]),
            (
                "checkpoints are names",
                {"n_checkpoints": ["a"]},
                TypeError,
                ["n_checkpoints", "['a']"],
            ),
            ("epochs 0", {"epochs": 0}, ValueError, ["epochs", "0"]),
            ("n_target 5000", {"n_target": 5000}, ValueError, ["n_target", "5000"]),
            ("seed 1.5", {"seed": 1.5}, TypeError, ["seed", "1.5"]),
            ("lr -1", {"lr": -1}, ValueError, ["lr", "-1"]),
        )
    ),
    BadInput(
        "examples.digits_checkpoints",
        "folder is a file",
        lambda folder: (folder / "file").write_text("mine") and checkpoints(folder / "file"),
        NotADirectoryError,
        ["folder", "file"],
    ),
]

TESTING = [
    BadInput(
        "testing.simulate_features",
        case,
        lambda _, c=changed: td.testing.simulate_features(**c),
        error,
        words,
    )
    for case, changed, error, words in (
        ("no samples", {"n_samples": 0}, ValueError, ["n_samples", "0", "64"]),
        ("samples are a share", {"n_samples": 0.5}, TypeError, ["n_samples", "0.5"]),
        ("proj_dim -1", {"proj_dim": -1}, ValueError, ["proj_dim", "-1"]),
        ("proj_dim None", {"proj_dim": None}, TypeError, ["proj_dim", "None"]),
        ("no checkpoints", {"n_checkpoints": 0}, ValueError, ["n_checkpoints", "0"]),
        ("names of checkpoints", {"n_checkpoints": ["a"]}, TypeError, ["n_checkpoints", "['a']"]),
        ("chunks 0", {"chunks": 0}, ValueError, ["chunks", "0"]),
        ("chunks is a tuple", {"chunks": (8, 8)}, TypeError, ["chunks", "(8, 8)"]),
        ("seed 1.5", {"seed": 1.5}, TypeError, ["seed", "1.5"]),
        ("seed -1", {"seed": -1}, ValueError, ["seed", "-1"]),
    )
]

ROWS = [*PLOTS, *EXAMPLES, *TESTING]


@parametrize(ROWS)
def test_bad_input(row: BadInput, tmp_path: Path) -> None:
    check(row, tmp_path)
