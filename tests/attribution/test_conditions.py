"""Conditions as text mean what the same comparisons of arrays do, and nothing else."""

from __future__ import annotations

import ast
import pickle

import numpy as np
import pytest
import xarray as xr

from trakdask.attribution.conditions import Condition

LABEL = np.array([0, 1, 2, 3, 3, 1])
SOURCE = np.array(["web", "books", "web", "web", "books", "x"])
WEIGHT = np.array([0.5, -1.0, 2.0, np.nan, 0.0, -3.5])
DAY = np.array(["2024-01-01", "2024-06-01", "2025-01-01"] * 2, dtype="M8[ns]")
GOOD = np.array([True, False] * 3)
TILE = xr.Dataset(
    coords={
        "label": ("sample", LABEL),
        "source": ("sample", SOURCE.astype(np.dtypes.StringDType())),
        "weight": ("sample", WEIGHT),
        "day": ("sample", DAY),
        "good": ("sample", GOOD),
        "target_label": ("target", np.array([3, 1])),
        "target_source": ("target", np.array(["web", "y"], np.dtypes.StringDType())),
    }
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("label == 3", LABEL == 3),
        ('label == 3 and source != "web"', (LABEL == 3) & (SOURCE != "web")),
        ("label < 1 or weight >= 0.5", (LABEL < 1) | (WEIGHT >= 0.5)),
        ("not (label > 1) and weight <= -1", ~(LABEL > 1) & (WEIGHT <= -1)),
        ("1 <= label < 3", (LABEL >= 1) & (LABEL < 3)),
        ("label in [1, 2]", np.isin(LABEL, [1, 2])),
        ("label in [3.0, -1, 0.5, 1e999, 99999999999999999999]", LABEL == 3),
        ("day in ['2024-06-01', '2025']", np.datetime64("2024-01-01") < DAY),
        ("source not in ('web', 'x')", ~np.isin(SOURCE, ["web", "x"])),
        ('day >= "2024-06-01"', np.datetime64("2024-06-01") <= DAY),
        ("good", GOOD),
        ("not good or label == 2", ~GOOD | (LABEL == 2)),
        ("good == False", ~GOOD),
        ("  weight != -1.0\t", WEIGHT != -1.0),
        ('"m" < source', SOURCE > "m"),
        ('"oo" in source', SOURCE == "books"),
    ],
)
def test_condition__is_the_comparison_of_arrays(text: str, expected: np.ndarray) -> None:
    result = Condition(text)(TILE)
    assert result.dims == ("sample",)
    np.testing.assert_array_equal(result.values, expected)


@pytest.mark.parametrize("sign", ["==", "!=", "<"])
def test_condition__of_texts_on_both_sides(sign: str) -> None:
    result = Condition(f"source {sign} target_source")(TILE).transpose("sample", "target")
    expected = [[eval(f"{a!r} {sign} {b!r}") for b in ("web", "y")] for a in SOURCE.tolist()]
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "label",
        "label = 3",
        "label == 3; import os",
        "True",
        "3 == 3",
        "unknown == 3",
        "label == 'web'",
        "source == 3",
        "day > 'soon'",
        "label + 1 == 3",
        "label in source",
        "3 in [3]",
        "label in [3, 'web']",
        "label is 3",
        "label == None",
        "label.values == 3",
        "max(label) == 3",
        "__import__('os').system('true') == 0",
        "(" * 5000,
    ],
)
def test_condition__anything_else_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected .*try |soon"):
        Condition(text)(TILE)
    with pytest.raises(ValueError, match="got 3"):
        Condition(3)  # type: ignore[arg-type]


def test_condition__is_parsed_where_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """No task parses: in threads, Python's parser fails before 3.11.8."""
    conditions = [Condition(text) for text in ("label == 3", "label in [1, 3] and not label < 2")]
    monkeypatch.setattr(ast, "parse", None)
    for condition in (*conditions, *pickle.loads(pickle.dumps(conditions))):
        np.testing.assert_array_equal(condition(TILE), TILE.label == 3)
        assert condition.names == {"label"}


MANY = {
    "label": (np.arange(400) % 90, [*range(0, 120, 2), -1, 2.5, 10**20, True]),
    "half": (np.linspace(0, 1, 11, dtype="f4")[np.arange(400) % 11], [i / 40 for i in range(41)]),
    "name": (np.array([f"n{i % 70}" for i in range(400)], object), [f"n{i}" for i in range(50)]),
    "text": (np.array([f"n{i % 70}" for i in range(400)]), [f"n{i}" for i in range(50)]),
    "day": (
        np.datetime64("2024-01-01", "ns") + np.arange(400) * np.timedelta64(1, "D"),
        [str(np.datetime64("2024-02-01") + 3 * i) for i in range(50)],
    ),
}


@pytest.mark.parametrize("name", MANY)
def test_condition__of_many_terms_is_that_of_each(name: str) -> None:
    values, constants = MANY[name]
    of_kind = np.datetime64 if name == "day" else lambda constant: constant
    expected = np.any([values == of_kind(constant) for constant in constants], axis=0)
    dtype = np.dtypes.StringDType() if name == "text" else values.dtype
    tile = xr.Dataset(coords={name: ("sample", values.astype(dtype)), "good": ("sample", expected)})
    apart = [f"{name} == {constant!r}" for constant in constants]
    for text in (f"{name} in {constants}", " or ".join(apart), f"good or {' or '.join(apart)}"):
        np.testing.assert_array_equal(Condition(text)(tile), expected)
    none = " and ".join(term.replace("==", "!=") for term in apart)
    np.testing.assert_array_equal(Condition(none)(tile), ~expected)
    assert Condition(" or ".join(apart * 100))(tile).sum() == expected.sum()


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("labell == 7", "try the coord 'label'"),
        ("Label == 7", "try the coord 'label'"),
        ("'w' in sorce", "try the coord 'source'"),
        ("source == web", "quotes around text"),
        ("good == true", "try True"),
        ("FALSE", "try False"),
        ("label = 7", "try label == 7"),
        ("label == 7 && ! good", "try label == 7 and not good"),
        ("label == 7 & good", "try label == 7 and good"),
        ("label <> 7 OR good", "try label != 7 or good"),
        ("source == “web”", 'try source == "web"'),
        ("label ≥ 3 and label ≠ 7", "try label >= 3 and label != 7"),
        ("~good", "try not good"),
        ("day > 'June'", "2024-06-01"),
        ("not " * 3000 + "good", "expected a condition"),
        (f"weight < 1{'0' * 400}", "at most 308 digits"),
        (f"weight < 0x{'f' * 5000}", "at most 308 digits"),
    ],
)
def test_condition__says_how_to_spell_it(text: str, remedy: str) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        Condition(text)(TILE)
    assert remedy in str(caught.value)
    assert len(str(caught.value)) < 600
