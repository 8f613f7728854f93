from __future__ import annotations

import pytest

from trakdask.trak import utils


@pytest.mark.parametrize("use_fast_jl", [False, True])
def test_test_install__says_what_was_tested(
    use_fast_jl: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    utils.test_install(use_fast_jl)
    printed = capsys.readouterr().out
    assert printed.startswith("TRAK is installed correctly!")
    assert ("fast_jl was not tested" in printed) == use_fast_jl
