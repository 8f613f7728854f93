from __future__ import annotations

import numpy as np
import pytest

from trakdask.arrays.weights import row_norms


@pytest.mark.parametrize("p", [1, 7, 64, 4097])
def test_row_norms__bits_of_a_row_do_not_depend_on_the_others(p: int) -> None:
    x = np.random.default_rng(0).standard_normal((200, p, 1)).astype("f4")
    x[3] = np.nan
    found = row_norms(x)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, (x.astype("f8") ** 2).sum(axis=1), rtol=1e-12)
    np.testing.assert_array_equal(np.concatenate([row_norms(row[None]) for row in x]), found)
    np.testing.assert_array_equal(row_norms(x[70:]), found[70:])
