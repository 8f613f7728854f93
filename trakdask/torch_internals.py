"""Undocumented names of torch that the package uses, with their reasons, and global settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

# Its public form, sdpa_kernel, restores what each thread finds, under the others.
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, _sdpa_kernel

# The documentation of torch names this module where it explains how operations are intercepted.
from torch.utils._python_dispatch import TorchDispatchMode

# Inputs and outputs of a layer may be a dictionary or an object of transformers that holds
# tensors. torch has no public function that finds them, and only this one knows the classes that
# libraries have registered.
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

_VIEWS = (
    *("View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "Select", "Slice", "Transpose"),
    *("Permute", "Alias", "Expand", "Clone", "ToCopy", "Clamp", "Stack", "Cat"),
)
"""Names of the operations of autograd that leave the values of tensors as they are."""


def fake_tensor_mode() -> Any:
    """Return the mode in which tensors have shapes but no values; the model's own may have some.

    Tensors on the device "meta" are no substitute: models of transformers ask whether a tensor is
    one of these, and do not read its values then.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second to import

    return FakeTensorMode(allow_non_fake_inputs=True)


def int8_matmul(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write left rightᵀ, the product of int8 matrices, to an int32 tensor.

    torch has no public name for it, and what it does may change: results are to be checked.
    """
    torch._int_mm(left, right.T, out=out)


class _SeesOperations:
    """Calls a function with every operation of torch and its arguments, before it runs.

    A class of its own, since torch imports its compiler, which takes a second, to wrap this method
    if a class of modes defines it itself.
    """

    def __init__(self, see: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self._see(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class Watching(_SeesOperations, TorchDispatchMode):
    """The mode in which a function sees the operations, and may raise an error before one."""


def storage_of(value: Any) -> int:
    """Return the place in memory of a tensor, or 0 where it has none of its own.

    Inside of ``torch.func`` a tensor wraps another one, which has the memory.
    """
    functorch = torch._C._functorch
    while isinstance(value, Tensor) and functorch.is_functorch_wrapped_tensor(value):
        value = functorch.get_unwrapped(value)
    # A subclass such as a fake tensor has no memory, and a sparse tensor no storage: asking it for
    # one is an error.
    if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
        return 0
    with torch._C.DisableTorchFunction():  # our own modes, which look for such calls by a model
        return value.untyped_storage().data_ptr()


def version_of(value: object) -> int:
    """Return how often a tensor was changed in place; 0 for anything else.

    Autograd itself compares this number, but has no public name for it.
    """
    return value._version if isinstance(value, Tensor) else 0


def uncompiled(module: nn.Module) -> nn.Module:
    """Undo ``torch.compile`` in a module: hooks are not called inside of compiled code.

    torch can compile a module, but has no public function that undoes it. ``module.compile()``
    keeps the compiled call in one attribute; ``torch.compile(module)`` wraps the module, and keeps
    it in another.
    """
    for part in module.modules():
        part._compiled_call_impl = None
        original = getattr(part, "_orig_mod", None)
        if isinstance(original, nn.Module):
            # `__call__` and not `forward`, since it is what calls the hooks.
            part.forward = original.__call__
    return module


class _WhileUsed:
    """Change a setting while any thread needs it; the last one restores what the first one found.

    Were each thread to restore what it found itself, one that began inside another would restore
    the changed value, for good.
    """

    def __init__(self, get: Callable[[], Any], change: Callable[[Any], None], value: Any) -> None:
        self._get, self._change, self._value = get, change, value
        self._lock, self._users, self._before = Lock(), 0, None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Change the setting while the ``with`` body runs."""
        with self._lock:
            if self._users == 0:
                self._before = self._get()
                if self._before != self._value:
                    self._change(self._value)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0 and self._before != self._value:
                    self._change(self._before)


float32_matmul_precision = {
    value: _WhileUsed(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, value)
    for value in ("highest", "high", "medium")
}
"""By its value. It is of the whole process: tasks that need two values at once get one of them."""

few_threads = _WhileUsed(torch.get_num_threads, torch.set_num_threads, 1)
"""One thread per operation, where there is a task on every core."""

cudnn_allow_tf32 = {
    value: _WhileUsed(
        lambda: torch.backends.cudnn.allow_tf32,
        lambda allowed: setattr(torch.backends.cudnn, "allow_tf32", allowed),
        value == "True",
    )
    for value in ("True", "False")
}
"""Whether convolutions of NVIDIA's GPUs round to ten bits, by the text of the value."""

math_attention = _WhileUsed(_cur_sdpa_kernel_backends, _sdpa_kernel, [SDPBackend.MATH])
"""Attention by plain operations: the only kind that vmap vectorises."""

_mha = torch.backends.mha
no_fast_path = _WhileUsed(_mha.get_fastpath_enabled, _mha.set_fastpath_enabled, False)
"""No fused kernels of ``nn.TransformerEncoder``.

Where no parameter requires a gradient, they run instead of the layers, whose hooks are not called
then, and turn padded batches into nested tensors, which have no shape and cannot be vectorised.
"""


def last_operation(result: Tensor) -> str:
    """Return the name of the operation that made a tensor, or that it is a view of.

    ``""`` if autograd does not know it.

    Examples
    --------
    >>> x = torch.ones(2, 3, requires_grad=True)
    >>> last_operation(x.softmax(1)[:, 0]), last_operation(x.log_softmax(1)), last_operation(x)
    ('softmax', 'logsoftmax', '')
    """
    base = result._base  # of views that were made in `no_grad`, which autograd does not know
    node = result.grad_fn if base is None or result.grad_fn is not None else base.grad_fn
    while node is not None and type(node).__name__.startswith(_VIEWS):
        node = node.next_functions[0][0]
    return "" if node is None else type(node).__name__.partition("Backward")[0].lower()
