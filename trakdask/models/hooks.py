"""Compute all per-sample gradients in one batched forward and backward pass.

Hooks on the layers record their inputs. When the backward pass reaches a layer's output, the
gradients of the layer's parameters are computed for each sample, passed to the sink and discarded.
The memory needed is therefore that of one layer, and the cost is about one backward pass. Autograd
itself does not differentiate the weights, which saves a third of its work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trakdask.models.coverage import Layer
from trakdask.models.layers import BY_POSITION, SLICEABLE, WRITES_TO, Rule, rules_of
from trakdask.models.local import Call, first_leaf, is_floating, local_gradients, unfolded
from trakdask.models.tasks import Forward

__all__ = [
    "Axes",
    "CachingForward",
    "CallAxes",
    "CallShapes",
    "GradientCollector",
    "caching",
    "recorded_shapes",
    "whole_parameters",
]

Sink = Callable[..., None]
Part = Callable[..., Tensor]
"""Computes the gradient of some rows of a weight, from one of its uses."""
FindsBuffer = Callable[[str, int], Tensor | None]
"""Returns where the sink wants a gradient from some element on, (rows, n), if it says so."""
CallAxes = tuple[list[int | None], list[int | None]]
"""The batch axis of each input and of each output of a call; None if it has no batch axis."""
CallShapes = tuple[list[Any], list[Any]]
Axes = dict[str, list[CallAxes]]
"""The axes of each call of a layer, by the path of the layer."""
Shapes = dict[str, list[CallShapes]]


_PART_BYTES = {"cpu": 2**22, "cuda": 2**28}
"""Size of a gradient slice: on a CPU it fits in a cache, on a GPU it outlasts a kernel launch."""


_ROUGHLY = 0.05
"""Relative error that no reordering stays below. Rounding errors can grow from layer to layer."""


class CachingForward(Forward):
    """A model that returns its last result again for the same inputs, so f and Q share one pass."""

    _last: tuple[list[Any], Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on a batch, or return the last result if the inputs are the same."""
        inputs = [*pytree.tree_leaves((args, kwargs)), *sorted(kwargs)]
        if self._last is None or not _are_same(self._last[0], inputs):
            self._last = inputs, super().__call__(*args, **kwargs)
        return self._last[1]

    def forget(self) -> None:
        """Release the last result, and with it the autograd graph that produced it."""
        self._last = None


def caching(forward: Forward) -> CachingForward:
    """Return the same model, so that it remembers its last result."""
    return CachingForward(
        forward.module, forward.parameters, forward.buffers, forward.checkpoint, forward.dtype
    )


def _are_same(left: list[Any], right: list[Any]) -> bool:
    """Compare tensors by identity, and other values by equality."""
    return len(left) == len(right) and all(
        a is b or not (isinstance(a, Tensor) or isinstance(b, Tensor) or a != b)
        for a, b in zip(left, right, strict=True)
    )


def recorded_shapes(
    run: Callable[[], object], module: nn.Module, layers: Sequence[Layer]
) -> Shapes:
    """Return the shapes of the inputs and outputs of every call of the layers during ``run()``."""
    shapes: Shapes = {layer.path: [] for layer in layers}

    def hook_of(layer: Layer) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            inputs, outputs = pytree.tree_leaves((args, kwargs)), pytree.tree_leaves(output)
            shapes[layer.path].append(([_shape(x) for x in inputs], [_shape(y) for y in outputs]))

        return hook

    with _hooked(module, layers, hook_of), torch.no_grad():
        run()
    return shapes


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else None


@contextmanager
def _hooked(
    module: nn.Module, layers: Sequence[Layer], hook_of: Callable[[Layer], Callable[..., Any]]
) -> Iterator[None]:
    handles = [
        module.get_submodule(layer.path).register_forward_hook(hook_of(layer), with_kwargs=True)
        for layer in layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def whole_parameters(
    module: nn.Module, layers: Sequence[Layer], allowed: Collection[Rule] = SLICEABLE
) -> set[str]:
    """Return the parameters whose gradients cannot be computed in slices of rows.

    More generally, those whose gradients are not always computed by one of the allowed rules.
    """
    whole = set()
    for layer in layers:
        rules = rules_of(module.get_submodule(layer.path)) or {}
        by_rules = set(layer.selected) <= set(rules)
        for inside, name in layer.selected.items():
            if not by_rules or rules[inside] not in allowed:
                whole.add(name)
    return whole


class GradientCollector:
    """Record a batch with hooks on the layers of a model, and compute its per-sample gradients.

    Parameters
    ----------
    forward
        The model; its parameters must not require gradients.
    layers
        The modules to hook.
    axes
        Batch axes of each layer's calls.
    n_samples
        Batch size.
    sink
        Receives the gradients of a parameter, (rows, numel), one row per sample, when all uses of
        the parameter have been processed. Gradients larger than 4 MB (on a GPU, 256 MB) are passed
        in slices, each with the index of its first element, if the rules of the layer allow it. If
        the sink has a method ``buffer_for``, those of linear layers are written where it says.
    """

    def __init__(
        self,
        forward: Forward,
        layers: Sequence[Layer],
        axes: Axes,
        n_samples: int,
        sink: Sink,
    ) -> None:
        self._forward = forward
        self._layers = layers
        self._axes = axes
        self._n_samples = n_samples
        self._n_rows = n_samples * self._rows_of_sample()
        self._sink = sink
        self._n_calls: dict[str, int] = defaultdict(int)
        self._due = {name: 0 for layer in layers for name in layer.selected.values()}
        self._sums: dict[str, Tensor] = {}
        self._buffer_for: FindsBuffer | None = getattr(sink, "buffer_for", None)
        whole = whole_parameters(forward.module, layers)
        self._copied = whole_parameters(forward.module, layers, WRITES_TO)
        self._parts: dict[str, list[Part]] = {
            name: []
            for name in self._due
            if name not in whole and (self._has_buffer(name) or self._is_large(name))
        }
        # Calls whose gradients are not known yet, by the number of their hook: a layer may be
        # called several times, and autograd finishes calls in another order than they were made.
        self._calls: dict[int, Call] = {}
        self._handles: list[Any] = []
        # Parameters are detached, so that autograd does not differentiate them, too. Added to the
        # output of the first layers, this makes autograd follow what becomes of it all the same.
        self._anchor = torch.zeros((), requires_grad=True)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record the calls of layers, and register hooks with autograd."""
        with _hooked(self._forward.module, self._layers, self._hook_of), torch.enable_grad():
            yield

    @contextmanager
    def comparing(self, row: int) -> Iterator[None]:
        """Compare what each layer sees of a sample alone, in one pass, with its rows in the batch.

        Raises
        ------
        ValueError
            If they differ, as where a layer gets some of the tokens of a batch, or sorts them: its
            rows could then not be told apart.
        """
        calls: dict[str, list[Call]] = defaultdict(list)
        for call in self._calls.values():
            calls[call.layer.path].append(call)

        def hook_of(layer: Layer) -> Callable[..., None]:
            in_batch = iter(calls[layer.path])

            def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                call = next(in_batch, None)
                if call is None or not _is_row(call, args, kwargs, row, self._n_samples):
                    raise ValueError(
                        f"layer {layer.path!r} does not see the same rows of a sample in a batch "
                        "as of the sample alone (the model branches on values of its input); try "
                        "gradients='loop'"
                    )

            return hook

        with _hooked(self._forward.module, self._layers, hook_of):
            yield

    def differentiate(self, output: Tensor) -> None:
        """Run the backward pass of the summed outputs, passing gradients to the sink on the way."""
        if output.requires_grad:
            output.sum().backward()  # also through tensors that the model made require gradients
        # What remains was not called, or has no effect on the output.
        for name in list(self._due):
            if self._parts.get(name):
                self._deliver_parts(name)
            else:
                self._deliver(name, self._sums.pop(name, None))

    def release(self) -> None:
        """Release all tensors, which reference cycles of the hooks would keep alive."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._calls.clear()
        self._parts.clear()

    def _hook_of(self, layer: Layer) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            i = self._n_calls[layer.path]
            self._n_calls[layer.path] += 1
            if i >= len(self._axes[layer.path]):
                raise RuntimeError(
                    f"expected the same number of calls of layer {layer.path!r} for every sample, "
                    "got more for some samples than for others; try gradients='loop'"
                )
            first = first_leaf(args, kwargs)
            # Autograd counts changes in place; the input must still be the one that was used.
            version = first._version if isinstance(first, Tensor) else 0
            buffers = dict(module._buffers)
            call = Call(layer, module, (args, kwargs), version, buffers, *self._axes[layer.path][i])
            return self._tap(call, output)

        return hook

    def _tap(self, call: Call, output: Any) -> Any:
        """Give every tensor of the output a batch axis, and make autograd call back for it."""
        if isinstance(output, Tensor):
            leaves, spec = [output], None
        else:
            leaves, spec = pytree.tree_flatten(output)
        taps = []
        for i, (leaf, axis) in enumerate(zip(leaves, call.out_axes, strict=True)):
            if is_floating(leaf):
                leaf = leaf if axis is not None else self._expanded(leaf)
                leaf = leaf if leaf.requires_grad else leaf + self._anchor
                # A view if the layer may have made another output from this one: the gradient has
                # to be that of the uses outside the layer alone.
                leaves[i] = leaf.view_as(leaf) if len(leaves) > 1 else leaf
                taps.append((leaves[i], axis or 0))
        for name in call.layer.selected.values():
            self._due[name] += 1
        if taps:
            self._handles.append(self._call_back(call, *zip(*taps, strict=True)))
        return leaves[0] if spec is None else pytree.tree_unflatten(leaves, spec)

    def _call_back(self, call: Call, leaves: Sequence[Tensor], axes: Sequence[int]) -> Any:
        """Register a function to call once the gradients of a call's outputs are known."""
        rules, key = rules_of(call.module), len(self._handles)
        self._calls[key] = call
        is_folded = leaves[0].shape[axes[0]] != self._n_samples
        if (
            rules is not None
            and set(call.layer.selected) <= set(rules)
            and not (is_folded and any(rules[i] not in BY_POSITION for i in call.layer.selected))
        ):
            return leaves[0].register_hook(
                lambda delta: self._by_rules(self._calls.pop(key), rules, delta, axes[0])
            )
        return torch.autograd.graph.register_multi_grad_hook(
            leaves, lambda deltas: self._locally(self._calls.pop(key), deltas, axes)
        )

    def _expanded(self, value: Tensor) -> Tensor:
        """Expand a tensor that all samples share, such as position embeddings, to a batch."""
        alone = value if value.shape[:1] == (1,) else value[None]
        return alone.expand(self._n_samples, *alone.shape[1:])

    def _rows_of_sample(self) -> int:
        """Return how many gradients each sample has."""
        return 1

    def _as_rows(self, call: Call, value: Tensor) -> Tensor:
        """Return a value that a layer took or returned, (batch, ...), with an entry per row."""
        return value

    def _by_rules(self, call: Call, rules: Any, delta: Tensor, axis: int) -> None:
        x = call.input(self._n_samples)
        x = self._as_rows(call, x if call.in_axes[0] is not None else self._expanded(x))
        delta = unfolded(delta, axis, self._n_samples).movedim(axis, 0)
        delta = self._as_rows(call, delta)
        if x.is_floating_point() and x.dtype != delta.dtype:
            x = x.to(delta.dtype)  # as autocast does inside the layer
        for inside, name in call.layer.selected.items():
            self._receive(call, name, rules[inside], x, delta)

    def _receive(self, call: Call, name: str, rule: Rule, x: Tensor, delta: Tensor) -> None:
        """Compute the gradient of a parameter from one of its uses, or postpone it."""
        part = partial(rule, call.module, x, delta, call.buffers)
        if name in self._parts:
            self._postpone(name, part)
        else:
            self._add(name, part())

    def _locally(self, call: Call, deltas: Sequence[Tensor | None], axes: Sequence[int]) -> None:
        """Differentiate a module without rules on its own, sample by sample."""
        forward, layer = self._forward, call.layer
        tensors = {i: forward.parameters[name] for i, name in layer.parameters.items()}
        tensors |= _inside(forward.buffers, layer.path)
        gradients = local_gradients(call, tensors, deltas, axes, self._n_rows)
        for inside, name in layer.selected.items():
            self._add(name, gradients[inside].reshape(self._n_rows, -1))

    def _is_large(self, name: str) -> bool:
        parameter = self._forward.parameters[name]
        return self._n_rows * parameter.numel() * parameter.element_size() > _part_bytes(parameter)

    def _postpone(self, name: str, part: Part) -> None:
        """Postpone a large gradient until all uses of the parameter are known."""
        self._due[name] -= 1
        self._parts[name].append(part)
        if not self._due[name]:
            self._deliver_parts(name)

    def _deliver_parts(self, name: str) -> None:
        parts, n_rows = self._parts.pop(name), len(self._forward.parameters[name])
        width, start = self._forward.parameters[name][0].numel(), 0
        del self._due[name]
        while start < n_rows:
            n, buffer = self._next_rows(name, start)
            rows = slice(start, min(start + n, n_rows))
            gradient = parts[0](rows) if buffer is None else parts[0](rows, buffer)
            if len(parts) > 1:
                gradient = gradient.clone()  # rules reuse the buffer of a gradient
            for part in parts[1:]:
                gradient += part(rows)
            self._sink(name, gradient, start * width)
            start = rows.stop

    def _has_buffer(self, name: str) -> bool:
        return self._buffer_for is not None and name not in self._copied

    def _next_rows(self, name: str, start: int) -> tuple[int, Tensor | None]:
        """Return how many rows of a weight to compute next, and where to write their gradient."""
        parameter = self._forward.parameters[name]
        width = parameter[0].numel()
        buffer = None
        if self._buffer_for and self._has_buffer(name):
            buffer = self._buffer_for(name, start * width)
        if buffer is None:
            bytes_of_row = self._n_rows * width * parameter.element_size()
            return max(1, _part_bytes(parameter) // bytes_of_row), None
        n = buffer.shape[1] // width
        return (n, buffer[:, : n * width]) if n else (1, None)

    def _add(self, name: str, gradient: Tensor) -> None:
        self._due[name] -= 1
        if name in self._sums:
            gradient = self._sums.pop(name).add_(gradient)
        if self._due[name]:
            self._sums[name] = gradient.clone()  # rules reuse the buffer of a gradient
        else:
            self._deliver(name, gradient)

    def _deliver(self, name: str, gradient: Tensor | None) -> None:
        if gradient is None:
            parameter = self._forward.parameters[name]
            gradient = parameter.new_zeros(1).expand(self._n_rows, parameter.numel())
        del self._due[name]
        self._sink(name, gradient)


def _is_row(call: Call, args: Any, kwargs: Any, row: int, n_samples: int) -> bool:
    """Return whether a layer's first input for a sample alone is that of a row of the batch."""
    axis, leaf = call.in_axes[0], first_leaf(args, kwargs)
    if axis is None:
        return True
    in_batch = call.input(n_samples)[row]
    alone = unfolded(leaf, axis, 1).movedim(axis, 0)[0]
    if alone.shape != in_batch.shape:
        return False
    alone, in_batch = alone.double(), in_batch.detach().double()
    return bool((alone - in_batch).norm() <= _ROUGHLY * alone.norm())


def _part_bytes(parameter: Tensor) -> int:
    return _PART_BYTES.get(parameter.device.type, _PART_BYTES["cpu"])


def _inside(tensors: Mapping[str, Tensor], path: str) -> dict[str, Tensor]:
    prefix = f"{path}." if path else ""
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
