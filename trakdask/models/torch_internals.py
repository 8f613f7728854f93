"""Names of torch that are not public, each with the reason why it is used all the same."""

from __future__ import annotations

from typing import Any

# The documentation of torch names this module where it explains how operations are intercepted.
from torch.utils._python_dispatch import TorchDispatchMode

# What a layer takes and returns may be a dictionary or an object of transformers that holds
# tensors. torch has no public function that finds them, and only this one knows the classes that
# libraries have registered.
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "TorchDispatchMode",
    "fake_tensor_mode",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]


def fake_tensor_mode() -> Any:
    """Return the mode in which tensors have shapes but no values; the model's own may have some.

    Tensors on the device "meta" are no substitute: models of transformers ask whether a tensor is
    one of these, and do not read its values then.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second to import

    return FakeTensorMode(allow_non_fake_inputs=True)
