"""Settings of the whole process, while several threads need them."""

from __future__ import annotations

import torch

from trakdask.models.torch_internals import few_threads, no_fast_path


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


def test_few_threads__restores_what_was_set() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with few_threads():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
