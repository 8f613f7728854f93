"""Per-sample gradients of the model output, with the classes of the TRAK package.

:class:`FunctionalGradientComputer` computes all of them in one backward pass if the output is
built-in and the model treats samples independently, and otherwise vectorises the gradient of one
sample. :class:`IterativeGradientComputer` differentiates one sample after the other.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn

from trakdask.models.gradients import Sink, hooks_gradients
from trakdask.models.tasks import Batch, Forward
from trakdask.trak.batched_tasks import BatchedTask, batched_task
from trakdask.trak.engines import (
    checked_outputs,
    differentiable,
    loss_gradient,
    named,
    require_evaluation,
    require_output_of_batch,
    require_output_of_sample,
    selected_parameters,
    vectorise,
    why_hooks_differ,
    widest,
)
from trakdask.trak.modelout_functions import AbstractModelOutput, CLIPModelOutput

__all__ = [
    "AbstractGradientComputer",
    "FunctionalGradientComputer",
    "IterativeGradientComputer",
]


class AbstractGradientComputer(ABC):
    """Base class of gradient computers, for subclasses of your own.

    ``TRAKer`` creates one with the arguments below and ``grad_wrt``. It calls
    ``load_model_params(model)`` for every checkpoint, and then, batch by batch,
    ``compute_per_sample_grad(batch)`` and ``compute_loss_grad(batch)``.

    Parameters
    ----------
    model
        The model.
    task
        The model output; the attribute is called ``modelout_fn``.
    grad_dim
        Number of parameters to differentiate with respect to.
    dtype
        Precision of the stored features; gradients have that of the parameters.
    device
        Device on which gradients are computed.
    """

    @abstractmethod
    def __init__(
        self,
        model: nn.Module,
        task: AbstractModelOutput,
        grad_dim: int | None = None,
        dtype: torch.dtype | None = torch.float16,
        device: torch.device | str | None = "cuda",
    ) -> None:
        self.model = model
        self.modelout_fn: Any = task
        self.grad_dim = grad_dim
        self.dtype = dtype
        self.device = device

    @abstractmethod
    def load_model_params(self, model: nn.Module) -> None:
        """Use the weights of a model that has just loaded a checkpoint."""

    @abstractmethod
    def compute_per_sample_grad(self, batch: Iterable[Tensor]) -> Any:
        """Return the gradients of a batch: a dictionary of tensors, or one (batch, parameters)."""

    @abstractmethod
    def compute_loss_grad(self, batch: Iterable[Tensor], batch_size: int) -> Tensor:
        """Return the derivative of the loss with respect to the model output, (batch, 1)."""


class FunctionalGradientComputer(AbstractGradientComputer):
    """Gradients of all samples of a batch at once.

    Parameters
    ----------
    model, task, grad_dim, dtype, device
        As for :class:`AbstractGradientComputer`.
    grad_wrt
        Names of the parameters to differentiate with respect to; None for all. Unlike in the TRAK
        package, gradients of other parameters are never computed.

    Attributes
    ----------
    func_weights, func_buffers
        Parameters and buffers by name.
    num_params
        Number of all parameters of the model.

    Raises
    ------
    ValueError
        If ``grad_wrt`` names a parameter that the model lacks, or none.

    Notes
    -----
    With a built-in output (not a subclass of one), a model in evaluation mode and no autocast,
    hooks on the layers compute the gradients in about one forward and one backward pass. For each
    checkpoint, the gradients of the first two samples are compared with one backward pass for each.
    If they differ, or the model cannot be hooked, ``torch.func.vmap`` runs instead, as in the TRAK
    package. The logger ``GradientComputer`` reports the choice.
    """

    _hooks_agree: Mapping[int, bool] = {}
    _weights_are_new = False

    def __init__(
        self,
        model: nn.Module,
        task: AbstractModelOutput,
        grad_dim: int | None,
        dtype: torch.dtype,
        device: torch.device | str,
        grad_wrt: Iterable[str] | None = None,
    ) -> None:
        super().__init__(model, task, grad_dim, dtype, device)
        self.num_params = sum(parameter.numel() for parameter in model.parameters())
        self.grad_wrt = None if grad_wrt is None else list(grad_wrt)
        self.logger = logging.getLogger("GradientComputer")
        self.load_model_params(model)
        selected_parameters(self.func_weights, self.grad_wrt)

    def load_model_params(self, model: nn.Module) -> None:
        """Use the parameters and buffers of a model."""
        self.func_weights: dict[str, Tensor] = dict(model.named_parameters())
        self.func_buffers: dict[str, Tensor] = dict(model.named_buffers())
        self._hooks_agree = {}
        self._weights_are_new = True

    def compute_per_sample_grad(self, batch: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return the gradient of every sample's model output with respect to each parameter.

        Parameters
        ----------
        batch
            The tensors that the model output takes, each with the samples along its first axis.

        Returns
        -------
        (batch, *shape) by name, in the order of the model and in the dtype of the parameter.

        Raises
        ------
        RuntimeError
            If a layer of batch normalisation is in training mode.
        TypeError, ValueError
            If the batch does not match the model output.
        """
        selected = selected_parameters(self.func_weights, self.grad_wrt)
        gradients: dict[str, Tensor] = {}

        def store(name: str, gradient: Tensor, first: int | None = None, /) -> None:
            n, size = len(gradient), selected[name].numel()
            if name not in gradients:
                gradients[name] = selected[name].new_empty((n, size), requires_grad=False)
            first = first or 0
            gradients[name][:, first : first + gradient.shape[1]] = gradient

        self._run(batch, store, gradients.__setitem__)
        return {n: gradients[n].reshape(-1, *tensor.shape) for n, tensor in selected.items()}

    def compute_loss_grad(self, batch: Iterable[Tensor]) -> Tensor:  # type: ignore[override]
        """Return the derivative of the loss as the model output defines it, (batch, 1)."""
        return loss_gradient(
            self.modelout_fn, self.model, self.func_weights, self.func_buffers, batch
        )

    @property
    def can_stream(self) -> bool:
        """Whether the methods below may be used: not if a subclass overrides the method above."""
        return not self._overrides("compute_per_sample_grad")

    def stream_per_sample_grad(self, batch: Iterable[Tensor], sink: Sink) -> Tensor | None:
        """Pass gradients to a sink parameter by parameter, if possible without storing all of them.

        Parameters
        ----------
        batch
            As for :meth:`compute_per_sample_grad`.
        sink
            Called as ``sink(name, gradient)`` with (batch, numel), or, in order,
            ``sink(name, part, first)`` with the elements from ``first`` on. Names come in any
            order. The next gradient may overwrite the memory of this one, so the sink must use or
            copy it before it returns. ``ProjectionStream.add`` is a sink.

        Returns
        -------
        The result of :meth:`compute_loss_grad`, (batch, 1) float32, if the same pass has computed
        it; else None.

        Notes
        -----
        Cost: with hooks, about one forward and one backward pass, and memory for the activations
        and the largest layer. With ``vmap``, memory for all gradients.
        """
        return self._run(batch, sink, sink)

    def flat_per_sample_grad(
        self, batch: Iterable[Tensor], out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return all gradients in one array, and the result of :meth:`stream_per_sample_grad`.

        Parameters
        ----------
        batch
            As for :meth:`compute_per_sample_grad`.
        out
            Array to write to, (batch, parameters) of any float dtype. By default a new array of the
            widest dtype among the parameters, so that the copy does not overflow.

        Returns
        -------
        Gradients (batch, parameters), flattened in the order of ``model.named_parameters()``; and
        the derivative of the loss (batch, 1), or None.
        """
        selected = selected_parameters(self.func_weights, self.grad_wrt)
        offsets, width = {}, 0
        for name, tensor in selected.items():
            offsets[name] = width
            width += tensor.numel()
        flat = out

        def write(name: str, gradient: Tensor, first: int | None = None, /) -> None:
            nonlocal flat
            if flat is None:
                dtype = widest(selected.values())
                flat = gradient.new_empty((len(gradient), width), dtype=dtype)
            start = offsets[name] + (first or 0)
            flat[:, start : start + gradient.shape[1]] = gradient

        q = self.stream_per_sample_grad(batch, write)
        assert flat is not None  # there is at least one parameter
        return flat, q

    def _run(
        self, batch: Iterable[Tensor], sink: Sink, own: Callable[[str, Tensor], None]
    ) -> Tensor | None:
        """Pass gradients to ``sink``, or to ``own`` if no copy is needed; return Q or None."""
        batch = tuple(batch)
        require_evaluation(self.model)
        require_output_of_sample(self.modelout_fn)
        self._warn_of_other_embeddings()
        names = tuple(selected_parameters(self.func_weights, self.grad_wrt))
        task = batched_task(self.modelout_fn)
        inputs = None if task is None else named(task, batch)
        try:
            if task is not None and inputs is not None and self._can_hook(task, inputs, names):
                with torch.enable_grad():
                    _, q = hooks_gradients(self._forward(), task, inputs, names, sink)
                return None if self._overrides("compute_loss_grad") else q[:, None]
            vectorise(self.modelout_fn, self._forward(), batch, names, own)
        except (IndexError, RuntimeError):
            if task is not None and inputs is not None:
                task.require_valid(self._forward(), inputs)
            raise
        return None

    def _overrides(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(FunctionalGradientComputer, method)

    def _forward(self) -> Forward:
        weights = {name: tensor.detach() for name, tensor in self.func_weights.items()}
        return Forward(self.model, weights, self.func_buffers)

    def _can_hook(self, task: BatchedTask, inputs: Batch, names: tuple[str, ...]) -> bool:
        if any(part.training for part in self.model.modules()):
            return False  # dropout must be independent for each sample
        first = next(iter(inputs.values()))
        if torch.is_autocast_enabled(first.device.type):
            return False
        n = min(2, len(first))  # hooks that agree for one sample may disagree for two
        if n not in self._hooks_agree:
            few = Batch({name: tensor[:n] for name, tensor in inputs.items()})
            why_not = why_hooks_differ(self._forward(), task, few, names)
            self.logger.debug("Gradients by %s", f"vmap: {why_not}" if why_not else "hooks")
            self._hooks_agree = {**self._hooks_agree, n: not why_not}
        return self._hooks_agree[n]

    def _warn_of_other_embeddings(self) -> None:
        """Check once per checkpoint whether CLIP's embeddings were computed with it."""
        if not self._weights_are_new or not isinstance(self.modelout_fn, CLIPModelOutput):
            return
        self._weights_are_new = False
        if self.modelout_fn.is_of_other_weights(self.model):
            warn(
                "expected embeddings that were computed with the loaded checkpoint, got those of "
                "other weights; try traker.task.get_embeddings(...) again after each "
                "load_checkpoint",
                UserWarning,
                stacklevel=4,
            )


class IterativeGradientComputer(AbstractGradientComputer):
    """Gradients of one sample after the other, by autograd, for outputs that take whole batches.

    For outputs whose ``get_output`` calls the model with the whole batch, and for models that
    ``torch.func`` cannot run. Slow: one backward pass per sample.

    Parameters
    ----------
    model, task, grad_dim, dtype, device
        As for :class:`AbstractGradientComputer`.
    grad_wrt
        Names of the parameters to differentiate with respect to; None for all. (The TRAK package
        ignores it here, and then fails.)

    Attributes
    ----------
    model_params
        The parameters to differentiate with respect to.

    Raises
    ------
    ValueError
        If ``grad_wrt`` names a parameter that the model lacks, or none.
    """

    def __init__(
        self,
        model: nn.Module,
        task: AbstractModelOutput,
        grad_dim: int | None,
        dtype: torch.dtype,
        device: torch.device | str,
        grad_wrt: Iterable[str] | None = None,
    ) -> None:
        super().__init__(model, task, grad_dim, dtype, device)
        self.grad_wrt = None if grad_wrt is None else list(grad_wrt)
        self.logger = logging.getLogger("GradientComputer")
        self.load_model_params(model)

    def load_model_params(self, model: nn.Module) -> None:
        """Use a model and its parameters."""
        self.model = model
        self.model_params = list(
            selected_parameters(dict(model.named_parameters()), self.grad_wrt).values()
        )

    def compute_per_sample_grad(self, batch: Iterable[Tensor]) -> Tensor:
        """Return the gradient of every sample's model output.

        Parameters
        ----------
        batch
            The tensors that the model output takes, each with the samples along its first axis.

        Returns
        -------
        (batch, parameters) in the order of ``model.named_parameters()``, float32, or float64 where
        a parameter is; zero where a parameter has no effect.

        Raises
        ------
        TypeError, ValueError
            If the model output does not take whole batches, or does not return one number per
            sample.
        """
        batch = tuple(batch)
        require_output_of_batch(self.modelout_fn)
        params = self.model_params
        with torch.enable_grad(), differentiable(self.model, params):
            returned = self.modelout_fn.get_output(self.model, None, None, *batch)
            outputs = checked_outputs(returned, len(batch[0]), self.modelout_fn)
            dtype = widest(params, at_least=torch.float32)
            width = sum(parameter.numel() for parameter in params)
            gradients = outputs.new_empty((len(outputs), width), dtype=dtype, requires_grad=False)
            for i, output in enumerate(outputs):
                is_last = i + 1 == len(outputs)
                of_sample = torch.autograd.grad(
                    output, params, retain_graph=not is_last, materialize_grads=True
                )
                gradients[i] = torch.cat([gradient.reshape(-1).to(dtype) for gradient in of_sample])
        return gradients

    def compute_loss_grad(self, batch: Iterable[Tensor]) -> Tensor:  # type: ignore[override]
        """Return the derivative of the loss as the model output defines it, (batch, 1)."""
        return loss_gradient(self.modelout_fn, self.model, None, None, batch)
