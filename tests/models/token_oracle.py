"""The oracle of token parts: every layer has a copy of its own for every token.

All copies have the same weights, so the model is the same; the gradient of the copy of token t is
what token t contributes, whatever the layer is.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from trakdask.models.tasks import Batch, Forward, Task


class PerToken(nn.Module):
    """A layer that treats tokens one by one, each with its own copy of the weights."""

    def __init__(self, layer: nn.Module, n_tokens: int) -> None:
        super().__init__()
        self.copies = nn.ModuleList(copy.deepcopy(layer) for _ in range(n_tokens))
        self.takes_ids = isinstance(layer, nn.Embedding)

    def forward(self, x: Tensor) -> Tensor:
        axis = x.ndim - 1 if self.takes_ids else x.ndim - 2
        columns = x.split(1, dim=axis)
        found = [layer(column) for layer, column in zip(self.copies, columns, strict=True)]
        return torch.cat(found, dim=axis)


def contributions(module: nn.Module, task: Task, batch: Batch, n_tokens: int) -> dict[str, Tensor]:
    """Gradient of each parameter, (sample, token, numel), by one ``backward()`` per sample."""
    canonical = {id(tensor): name for name, tensor in module.named_parameters()}
    wrapped, layers = copy.deepcopy(module), {}
    for path, layer in module.named_modules():
        if layer._parameters and path:
            own = layer.named_parameters(recurse=False)
            layers[path] = {name: canonical[id(p)] for name, p in own}
            wrapped.set_submodule(path, PerToken(layer, n_tokens))
    sizes = dict(module.named_parameters())
    n = len(next(iter(batch.values())))
    found = {
        name: torch.zeros(n, n_tokens, sizes[name].numel(), dtype=sizes[name].dtype)
        for name in canonical.values()
    }
    for i in range(n):
        wrapped.zero_grad()
        one = Batch({name: value[i : i + 1] for name, value in batch.items()})
        plain = Forward(wrapped, dict(wrapped.named_parameters()), dict(wrapped.named_buffers()))
        task.output(plain, one)[0].backward()
        for path, own in layers.items():
            for t, each in enumerate(wrapped.get_submodule(path).copies):
                for inside, name in own.items():
                    grad = each.get_parameter(inside).grad
                    if grad is not None:
                        found[name][i, t] += grad.flatten()
    return found
