"""A kind of warning is shown once, and one that became an error is raised again."""

from __future__ import annotations

import warnings

import pytest

from trakdask.errors import forget_warnings, warn_once


def test_warn_once__one_of_each_kind() -> None:
    shown: list[str] = []
    warn_once("few", "there is 1 target", shown.append)
    warn_once("few", "there are 2 targets", shown.append)
    warn_once("grid", "at the end of the grid", shown.append)
    assert shown == ["there is 1 target", "at the end of the grid"]
    forget_warnings()
    with pytest.warns(UserWarning, match="again"):
        warn_once("few", "again")


def test_warn_once__what_a_filter_made_an_error_is_not_shown() -> None:
    for _ in range(2):
        with pytest.raises(UserWarning, match="few"):
            warn_once("few", "few")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warn_once("few", "few")
    warn_once("few", "few")
