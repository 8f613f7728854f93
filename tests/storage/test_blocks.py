"""Half precision with a scale per row, against the bound and against exactness by definition."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes
from hypothesis.extra.numpy import arrays as np_arrays

from trakdask.storage.blocks import encoded
from trakdask.storage.reading import from_half


def round_trip(feature: np.ndarray) -> np.ndarray:
    stored, scale = encoded(feature)
    assert stored.dtype == np.float16
    result = from_half(stored, scale)
    assert result.dtype == np.float32
    return result


LAST = np.finfo("f4").max


@example(np.array([[LAST, -LAST, 1.0], [LAST, np.inf, -np.inf]], "f4")[:, :, None])
@given(
    np_arrays(
        np.float32,
        array_shapes(min_dims=2, max_dims=2, max_side=6).map(lambda shape: (*shape, 1)),
        elements=st.floats(width=32),
    )
)
def test_encoded__error_is_bounded_by_the_largest_finite_of_the_row(feature: np.ndarray) -> None:
    found = round_trip(feature).astype("f8")
    finite = np.isfinite(feature)
    np.testing.assert_array_equal(found[~finite], feature[~finite].astype("f8"))
    largest = np.abs(np.where(finite, feature, 0).astype("f8")).max(axis=1, keepdims=True)
    # Below 2^-149 float32 itself has nothing between its numbers.
    bound = np.broadcast_to(np.maximum(2.0**-11 * largest, 2.0**-150), feature.shape)
    error = np.abs(np.where(finite, found, 0) - np.where(finite, feature, 0).astype("f8"))
    assert (error <= bound).all()


def test_encoded__eleven_bits_are_exact_at_any_scale() -> None:
    bits = np.array([0, 1, -1, 5, 1024, 2047, -2047, -0.0], "f8")
    powers = np.array([-149, -140, -126, -30, 0, 17, 116])
    feature = np.ldexp(bits, powers[:, None]).astype("f4")[:, :, None]
    found = round_trip(feature)
    np.testing.assert_array_equal(found, feature)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(feature))
    mantissa, _ = np.frexp(encoded(feature)[1])
    assert set(mantissa.ravel().tolist()) == {0.5}  # the scale is a power of two
