"""Compute all per-sample gradients in one batched forward and backward pass.

Hooks on the layers record their inputs. When the backward pass reaches a layer's output, the
gradients of the layer's parameters are computed for each sample, passed to the sink and discarded.
So the memory is the memory of one layer, and the cost is about one backward pass. Autograd itself
does not differentiate the weights, which saves a third of its work.

A layer that treats the tokens of a sequence one by one uses its weights once per token, so that the
gradient of a weight is a sum with one term per token: Σ_t δ_t x_tᵀ for a linear layer, where x_t is
the layer's input at token t, and δ_t the gradient with respect to its output there. These
terms come from the same backward pass as the sum, if batches of tokens are asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trakdask.models.calls import (
    Call,
    by_sample,
    first_leaf,
    is_by_token,
    is_floating,
    local_gradients,
)
from trakdask.models.delivery import Delivery
from trakdask.models.layers import HookedLayer, rules_by_parameter
from trakdask.models.plans import hooked
from trakdask.models.products import PRODUCTS, Products, wide
from trakdask.models.rules import BY_POSITION, TURNABLE, GradientRule, sides_turned
from trakdask.models.tasks import Forward
from trakdask.tensors import Rotations, rotated
from trakdask.torch_internals import tree_flatten, tree_unflatten, version_of


class GradientCollector:
    """Record a batch with hooks on the layers of a model, and compute its per-sample gradients.

    Parameters
    ----------
    forward
        The model; its parameters must not require gradients.
    layers
        The modules to hook, with the batch axes of their calls.
    n_samples
        Batch size.
    sink
        Receives the gradients of a parameter, (rows, numel), one row per sample, when all uses of
        the parameter have been processed. Gradients larger than 4 MB (on a GPU, 64 MB) are passed
        in slices, each with the index of its first element, if the rules of the layer allow it. If
        the sink has a method ``buffer_for(name, first)``, the gradients of linear layers are
        written where it says.
    n_tokens
        Length of the sequences, if each of their tokens is to have a row of its own: all tokens of
        the first sequence first. Then a sink of :class:`Products` receives products.
    rotations
        Coordinates in which the sink receives the gradients of some parameters.
    """

    def __init__(
        self,
        forward: Forward,
        layers: Sequence[HookedLayer],
        n_samples: int,
        sink: Callable[..., None],
        n_tokens: int | None = None,
        rotations: Rotations | None = None,
    ) -> None:
        self._forward = forward
        self._rotations = rotations or {}
        self._layers = layers
        # The plan knows the batch axes of the i-th call of each layer, by the path of the layer.
        self._axes = {layer.path: iter(layer.calls) for layer in layers}
        self._n_samples = n_samples
        self._n_tokens = n_tokens
        self._n_rows = n_samples * (n_tokens or 1)
        self._products = sink if isinstance(sink, Products) and n_tokens else None
        self._has_others = self._products is None or self._products.has_others
        rules = rules_by_parameter(layers)
        self._delivery = Delivery(forward.parameters, rules, self._n_rows, sink)
        # Calls whose gradients are not known yet, by the number of their hook: a layer may be
        # called several times, and autograd finishes calls in another order than they were made.
        # A hook takes its call out of here, so that the inputs of a layer are released as soon as
        # its gradients are known, and all of them if a pass fails.
        self._calls: dict[int, Call] = {}
        self._handles: list[Any] = []
        # Parameters are detached, so that autograd does not differentiate them, too. Added to the
        # output of the first layers, this makes autograd follow what becomes of it all the same.
        device = next(iter(forward.parameters.values())).device
        self._anchor = torch.zeros((), device=device, requires_grad=True)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record the calls of layers, and register hooks with autograd."""
        with hooked(self._forward.module, self._layers, self._hook_of), torch.enable_grad():
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

        def hook_of(layer: HookedLayer) -> Callable[..., None]:
            in_batch = iter(calls[layer.path])

            def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                call = next(in_batch, None)
                if call is None or not call.has_row(row, first_leaf(args, kwargs), self._n_samples):
                    raise ValueError(
                        f"expected the same rows of a sample in a batch as of the sample alone at "
                        f"layer {layer.path!r}, got other ones; try gradients='loop'"
                    )

            return hook

        with hooked(self._forward.module, self._layers, hook_of):
            yield

    def differentiate(self, output: Tensor) -> None:
        """Run the backward pass of the summed outputs, passing gradients to the sink on the way."""
        if output.requires_grad:
            output.sum().backward()  # also through tensors that the model made require gradients
        if self._products is None:  # a gradient of zero would add no product
            self._delivery.finish()

    def release(self) -> None:
        """Release all tensors, which reference cycles of the hooks would keep alive."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._calls.clear()
        self._delivery.clear()

    def _hook_of(self, layer: HookedLayer) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            axes = next(self._axes[layer.path], None)  # calls are told apart by their order
            if axes is None:
                raise ValueError(
                    f"expected as many calls of layer {layer.path!r} for a batch of any size, got "
                    f"more for {self._n_samples} samples than for two (does the model loop over "
                    "samples?); try gradients='vmap', or 'loop'"
                )
            if not torch.is_grad_enabled():  # the model switched it off: this call has no gradient
                return output
            # The backward pass reads the input, which must still be the one that was used.
            version = version_of(first_leaf(args, kwargs))
            # Buffers of this checkpoint, which leave the module after the forward pass.
            buffers = dict(module.named_buffers(recurse=False))
            return self._tap(Call(layer, module, (args, kwargs), version, buffers, *axes), output)

        return hook

    def _tap(self, call: Call, output: Any) -> Any:
        """Give every tensor of the output a batch axis, and make autograd call back for it."""
        # 1. The tensors that the backward pass is to reach.
        leaves, spec = ([output], None) if isinstance(output, Tensor) else tree_flatten(output)
        taps, axes = [], []
        for i, (leaf, axis) in enumerate(zip(leaves, call.out_axes, strict=True)):
            if is_floating(leaf):
                leaf = leaf if axis is not None else by_sample(leaf, axis, self._n_samples)
                leaf = leaf if leaf.requires_grad else leaf + self._anchor
                # A view if the layer may have made another output from this one: only uses outside
                # of the layer may add to the gradient.
                leaves[i] = leaf.view_as(leaf) if len(leaves) > 1 else leaf
                taps.append(leaves[i])
                axes.append(axis or 0)
        for name in call.layer.selected.values():
            self._delivery.expect(name)
        result = leaves[0] if spec is None else tree_unflatten(leaves, spec)
        if not taps:
            return result
        # 2. Whether gradients are divided among tokens.
        if self._n_tokens is not None:
            x, sizes = first_leaf(*call.inputs), (self._n_samples, self._n_tokens)
            of_tokens = is_by_token(taps[0], axes[0], *sizes) and (
                not isinstance(x, Tensor) or is_by_token(x, call.in_axes[0], *sizes)
            )
            call = replace(call, by_token=of_tokens or not self._has_others)
        # 3. What to call once the gradients of the outputs are known. The number of hooks so far is
        # a key that no other call has: handles are only added until the backward pass is over. It
        # is not the path of the layer, which may be called again before autograd has finished its
        # first call.
        key, rules = len(self._handles), call.layer.rules
        self._calls[key] = call
        # Where rows of a sample were folded into the batch axis, only rules that treat all
        # positions alike are right: to others, the axis behind the samples would be channels.
        is_folded = taps[0].shape[axes[0]] != self._n_samples
        needed = [rules[inside] for inside in call.layer.selected] if rules else []
        handle: Any
        if needed and (BY_POSITION.issuperset(needed) or not is_folded):
            handle = taps[0].register_hook(
                lambda delta: self._by_rules(self._calls.pop(key), delta, axes[0])
            )
        else:
            handle = torch.autograd.graph.register_multi_grad_hook(
                taps, lambda deltas: self._locally(self._calls.pop(key), deltas, axes)
            )
        self._handles.append(handle)
        return result

    def _rows(self, call: Call, value: Any, axis: int | None) -> Any:
        """Return a value that a layer took or returned, (rows, ...), rows being samples or tokens.

        (batch, tokens, ...) becomes (batch * tokens, 1, ...), a batch of single tokens.
        """
        if not isinstance(value, Tensor):
            return value
        value = by_sample(value, axis, self._n_samples)
        if not call.by_token:
            return value
        if tuple(value.shape[:2]) != (self._n_samples, self._n_tokens):
            raise ValueError(
                f"expected a value for each of {self._n_tokens} tokens at layer "
                f"{call.layer.path!r}, got shape {tuple(value.shape)} for {self._n_samples} "
                "sequences; try td.Model(..., parameters=...) without it, or modules as parts="
            )
        return value.reshape(-1, 1, *value.shape[2:])

    def _by_rules(self, call: Call, delta: Tensor, axis: int) -> None:
        x = self._rows(call, call.input(), call.in_axes[0])
        delta = self._rows(call, delta, axis)
        if x.is_floating_point() and x.dtype != delta.dtype:
            x = x.to(delta.dtype)  # as autocast does inside the layer
        for inside, name in call.layer.selected.items():
            self._receive(call, name, call.layer.rules[inside], x, delta)

    def _receive(self, call: Call, name: str, rule: GradientRule, x: Tensor, delta: Tensor) -> None:
        """Compute the gradient of a parameter from one of its uses, or postpone it."""
        if self._products is not None and rule in PRODUCTS:  # without the gradient
            delta = wide(delta)
            x = x.to(delta.dtype) if x.is_floating_point() else x
            vectors = self._products.vectors(name, delta.dtype)
            products = PRODUCTS[rule](call.module, x, delta, vectors)
            self._products.add(name, products, by_token=call.by_token)
            return
        matrices = self._rotations.get(name, {})
        # The channels of groups are apart, so that they cannot be rotated before they meet.
        is_turnable = rule in TURNABLE and getattr(call.module, "groups", 1) == 1
        if matrices and is_turnable:
            rule, x, delta = sides_turned(rule, call.module, x, delta, matrices)
        gradient = partial(rule, call.module, x, delta, call.buffers)
        if matrices and not is_turnable:  # at once: the next rule overwrites what this one returns
            whole = in_coordinates(gradient(), name, self._forward, self._rotations)
            self._use(call, name, lambda: whole)
        else:
            self._use(call, name, gradient)

    def _locally(self, call: Call, deltas: Sequence[Tensor | None], axes: Sequence[int]) -> None:
        """Differentiate a module without rules on its own, row by row."""
        if call.by_token:  # as if of a batch of single tokens
            leaves, spec = tree_flatten(call.inputs)
            leaves = [self._rows(call, *pair) for pair in zip(leaves, call.in_axes, strict=True)]
            in_axes = [0 if isinstance(leaf, Tensor) else None for leaf in leaves]
            deltas = [self._rows(call, *pair) for pair in zip(deltas, axes, strict=True)]
            call = replace(call, inputs=tree_unflatten(leaves, spec), in_axes=in_axes)
            axes = [0] * len(deltas)
        forward, layer = self._forward, call.layer
        tensors = {i: forward.parameters[name] for i, name in layer.parameters.items()}
        prefix = f"{layer.path}." if layer.path else ""
        others = {**forward.buffers, **forward.others}
        for name, first in forward.reading.places.items():
            if name.startswith(prefix) and first in others:
                tensors[name.removeprefix(prefix)] = others[first]
        n_rows = self._n_rows if call.by_token else self._n_samples
        read = forward.reading.of(call.module)
        gradients = local_gradients(call, read, tensors, deltas, axes, n_rows)
        for inside, name in layer.selected.items():
            rows = gradients[inside].reshape(n_rows, -1)
            gradient = in_coordinates(rows, name, forward, self._rotations)
            self._use(call, name, lambda gradient=gradient: gradient)

    def _use(self, call: Call, name: str, rows_of_gradient: Callable[..., Tensor]) -> None:
        """Pass on the function that gives the gradient of one use."""
        if self._products is not None:  # they are linear: no need to wait for the other uses
            self._products(name, rows_of_gradient(), by_token=call.by_token)
            return
        if self._n_tokens and not call.by_token:
            rows_of_gradient = partial(_at_first_token, rows_of_gradient, self._n_tokens)
        self._delivery.add(name, rows_of_gradient)


def in_coordinates(
    gradient: Tensor, name: str, forward: Forward, rotations: Rotations | None
) -> Tensor:
    """Return gradients of a parameter, (rows, numel), in the coordinates that a sink wants."""
    matrices = (rotations or {}).get(name)
    shape = tuple(forward.parameters[name].shape)
    return rotated(gradient, shape, matrices) if matrices else gradient


def _at_first_token(rows_of_gradient: Callable[..., Tensor], n_tokens: int, *where: Any) -> Tensor:
    """Return the gradient of whole samples as a gradient of their first tokens, (tokens, numel)."""
    gradient = rows_of_gradient(*where)
    rows = gradient.new_zeros(len(gradient) * n_tokens, gradient.shape[1])
    rows[::n_tokens] = gradient
    return rows
