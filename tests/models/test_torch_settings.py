"""Settings of the whole process, while several threads need them."""

from __future__ import annotations

import torch

from trakdask.models.torch_internals import no_fast_path


def test_no_fast_path__the_last_user_restores_it() -> None:
    """As with two tasks, of which the one that begins first ends first."""
    get = torch.backends.mha.get_fastpath_enabled
    first, second = no_fast_path(), no_fast_path()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not get()
    second.__exit__(None, None, None)
    assert get()
