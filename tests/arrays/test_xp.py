"""The same kernels by numpy and by a stand-in for CuPy, whose arrays refuse to meet numpy's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import dask.array as da
import numpy as np
import pytest

from trakdask.arrays.gram import gram, gram_and_sum
from trakdask.arrays.score import score
from trakdask.arrays.xp import array_module


class OnDevice(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of a GPU, as far as the kernels know it: no numpy array may come near."""

    def __init__(self, host: np.ndarray) -> None:
        self.host = host
        self.dtype, self.shape = host.dtype, host.shape

    def __array_ufunc__(self, ufunc: Any, _: str, *inputs: Any, out: Any = ()) -> OnDevice:
        """Compute what an operator asks for, with numbers and other arrays of the device."""
        values = [each if np.isscalar(each) else hosted(each) for each in inputs]
        return OnDevice(ufunc(*values, out=tuple(map(hosted, out)) or None))

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    @property
    def T(self) -> OnDevice:
        return OnDevice(self.host.T)

    def get(self) -> np.ndarray:
        return self.host.copy()

    def astype(self, dtype: Any, copy: bool = True) -> OnDevice:
        return OnDevice(self.host.astype(dtype, copy=copy))

    def __getitem__(self, key: Any) -> OnDevice:
        return OnDevice(self.host[key])

    def __setitem__(self, key: Any, value: OnDevice) -> None:
        self.host[key] = hosted(value)


def hosted(array: Any) -> np.ndarray:
    assert isinstance(array, OnDevice)
    return array.host


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Tell this process to use a stand-in for CuPy; the functions that are called."""
    called: list[str] = []
    cupy = ModuleType("cupy")

    def add(name: str, function: Callable[..., Any]) -> None:
        def counted(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return function(*args, **kwargs)

        setattr(cupy, name, counted)

    add("asarray", lambda x: x if isinstance(x, OnDevice) else OnDevice(np.array(x)))
    add("zeros", lambda shape, dtype: OnDevice(np.zeros(shape, dtype)))
    add("empty", lambda shape, dtype: OnDevice(np.empty(shape, dtype)))
    add("where", lambda c, x, y: OnDevice(np.where(hosted(c), x, hosted(y))))
    add("matmul", lambda x, y, out: OnDevice(np.matmul(hosted(x), hosted(y), out=hosted(out))))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setenv("TRAKDASK_XP", "cupy")
    return called


def products() -> list[np.ndarray]:
    """Gram matrices and scores, of each kind that kernels tell apart."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((70, 5, 3), dtype=np.float32)
    x[7, :, 1] = np.nan  # failed there
    feature, solved = (da.from_array(part, chunks=(16, -1, 1)) for part in (x, x[:9]))
    weights = da.from_array(rng.random((70, 3), dtype=np.float32), chunks=(16, 1))
    lazy = [
        gram(feature),
        gram(feature, weights),
        *gram_and_sum(feature, weights, weights),
        *(score(feature, solved, g) for g in (None, weights)),
        *(score(feature, solved, weights, average=a, pooled=p) for a, p in ((0, 1), (1, 0))),
    ]
    return [array.compute(scheduler="sync") for array in lazy]


def test_kernels__by_cupy(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = products()
    assert {"asarray", "zeros", "empty", "where", "matmul"} == set(told)
    monkeypatch.delenv("TRAKDASK_XP")
    told.clear()
    for ours, expected in zip(found, products(), strict=True):
        assert type(ours) is np.ndarray
        # The stand-in copies, after which BLAS need not see that both factors are the same.
        np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=2e-5)
    assert not told


@pytest.mark.gpu
def test_kernels__on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has not run on a GPU yet."""
    expected = products()
    monkeypatch.setenv("TRAKDASK_XP", "cupy")
    for ours, theirs in zip(products(), expected, strict=True):
        assert type(ours) is np.ndarray
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def test_array_module__by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAKDASK_XP", "numpy")
    assert array_module() is np
    monkeypatch.setenv("TRAKDASK_XP", "torch")
    with pytest.raises(ValueError, match="torch"):
        array_module()
    monkeypatch.setenv("TRAKDASK_XP", "cupy")
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r"trakdask\[cuda\]"):
        array_module()
