"""Per-sample gradients of the model output, with the classes of the TRAK package.

:class:`FunctionalGradientComputer` uses the engines of trakdask: hooks, which take one backward
pass for a batch, if the output is built-in and the model treats samples independently, otherwise
``vmap``, and one pass for each sample where this fails.
:class:`IterativeGradientComputer` differentiates one sample after the other.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn

from trakdask.models.gradients import (
    hooks_gradients,
    loop_gradients,
    require_same_as_loop,
    vmap_gradients,
)
from trakdask.models.tasks import Batch, Forward, Task, TrakTask
from trakdask.trak.modelout_functions import (
    TASK_TO_MODELOUT,
    AbstractModelOutput,
    CLIPModelOutput,
    IterativeImageClassificationModelOutput,
    batched_task,
)

# Samples of a checkpoint whose gradients are compared: a model may sort its batch, and two samples
# are in order by chance.
_CHECKED = 16


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
        Precision of the stored features; gradients have the precision of the parameters.
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
        self.logger = logging.getLogger("GradientComputer")

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
    TypeError
        If ``task`` is a built-in output for :class:`IterativeGradientComputer`.
    ValueError
        If ``grad_wrt`` names a parameter that the model lacks, or none.

    Notes
    -----
    With a built-in output (not a subclass of one), a model in evaluation mode and no autocast,
    hooks on the layers compute the gradients in about one forward and one backward pass. For each
    checkpoint, the gradients of the first 16 samples are compared with one backward pass for each.
    If they differ, or the model cannot be hooked, ``torch.func.vmap`` runs instead, as in the TRAK
    package; and where this fails, one backward pass for each sample, unless the model is in
    training mode. The logger ``GradientComputer`` reports the choice.
    """

    # Defaults of the class as well, since subclasses may replace load_model_params.
    func_weights: Any = None  # None: the model has its own
    func_buffers: Any = None
    _hooks_agree, _n_checked, _is_new_checkpoint = True, 0, True
    _needs_loop = False  # once vmap has failed, at whatever checkpoint

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
        kind = type(task)
        takes_batches = kind is IterativeImageClassificationModelOutput
        is_iterative = isinstance(self, IterativeGradientComputer)
        if kind in TASK_TO_MODELOUT.values() and takes_batches != is_iterative:
            raise TypeError(
                f"expected an output for {type(self).__name__}, got {kind.__name__}; try "
                "gradient_computer=IterativeGradientComputer for "
                "task='iterative_image_classification' only"
            )
        self.num_params = sum(parameter.numel() for parameter in model.parameters())
        self.grad_wrt = None if grad_wrt is None else list(grad_wrt)
        self.load_model_params(model)

    def load_model_params(self, model: nn.Module) -> None:
        """Use the parameters and buffers of a model."""
        self.func_weights = dict(model.named_parameters())
        self.func_buffers = dict(model.named_buffers())
        # Hooks are compared for each checkpoint, since what a model does may depend on its weights.
        # Whether vmap fails depends on its code.
        self._hooks_agree, self._n_checked, self._is_new_checkpoint = True, 0, True

    def compute_loss_grad(self, batch: Iterable[Tensor]) -> Tensor:  # type: ignore[override]
        """Return the derivative of the loss as the model output defines it, (batch, 1)."""
        gradient: Tensor = self.modelout_fn.get_out_to_loss_grad(
            self.model, self.func_weights, self.func_buffers, batch
        )
        # The package's tasks compute it in float32; the original, in the precision of the model.
        return gradient.detach().to(next(self.model.parameters()).dtype)

    def compute_per_sample_grad(self, batch: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return the gradient of every sample's model output with respect to each parameter.

        Parameters
        ----------
        batch
            The tensors that the model output takes, each with the samples along its first axis.

        Returns
        -------
        (batch, *shape) by name, in the order of the model and in the dtype of the parameter.
        """
        # 1. Once per checkpoint: CLIP's embeddings were computed with it.
        is_pair = isinstance(self.modelout_fn, CLIPModelOutput)
        if is_pair and self._is_new_checkpoint and self.modelout_fn.is_of_other_weights(self.model):
            warn(
                "expected embeddings by the loaded checkpoint, got those by other weights; try "
                "traker.task.get_embeddings(...) again after each load_checkpoint",
                UserWarning,
                stacklevel=4,  # the caller of TRAKer.featurize
            )
        self._is_new_checkpoint = False
        # 2. The gradients, by one of three engines.
        tensors = list(batch)
        selected = selected_parameters(self.func_weights, self.grad_wrt)
        # (sample, element) of each parameter. Large gradients arrive in slices, which begin at
        # `first`.
        gradients = {
            name: torch.empty(len(tensors[0]), t.numel(), dtype=t.dtype, device=t.device)
            for name, t in selected.items()
        }

        def keep(name: str, gradient: Tensor, first: int | None = None, /) -> None:
            start = first or 0
            gradients[name][:, start : start + gradient.shape[1]] = gradient

        # The engines expect parameters that require no gradients: else autograd would differentiate
        # the weights of the live model, too.
        weights = {name: tensor.detach() for name, tensor in self.func_weights.items()}
        forward, names = Forward(self.model, weights, self.func_buffers), tuple(selected)
        # The Q of an output of your own may need autograd, and targets have none.
        task = batched_task(self.modelout_fn) or TrakTask(self.modelout_fn, has_q=False)
        # An output of your own takes its tensors in their order, whatever their names are.
        variables = getattr(task, "variables", None) or map(str, range(len(tensors)))
        inputs = Batch(zip(variables, tensors, strict=True))
        if self._can_hook(forward, task, inputs, names):
            with torch.enable_grad():
                hooks_gradients(forward, task, inputs, names, keep)
        else:
            self._run_others(forward, task, inputs, names, keep)
        return {name: g.reshape(-1, *selected[name].shape) for name, g in gradients.items()}

    def _run_others(
        self, forward: Forward, task: Task, inputs: Batch, names: tuple[str, ...], keep: Any
    ) -> None:
        """Run vmap, or, if it fails, the loop."""
        why = ""
        if not self._needs_loop:
            try:
                vmap_gradients(forward, task, inputs, names, keep)
                return
            except Exception as err:
                if self._is_training():  # alone, samples would have other batch statistics
                    raise
                why = f"{type(err).__name__}: {err}"
        with torch.enable_grad():
            loop_gradients(forward, task, inputs, names, keep)
        # Only once the loop has worked is vmap to blame: else the batch itself is wrong, and the
        # next one may be right.
        if why:
            self._needs_loop = True
            self.logger.warning("Gradients by loop, which is slow, because vmap failed: %s", why)

    def _is_training(self) -> bool:
        """Return whether a module acts in another way than in evaluation."""
        # cuDNN differentiates recurrent layers in training mode only, and users leave them in it.
        # Without dropout they compute the same in both modes.
        return any(
            part.training and not (isinstance(part, nn.RNNBase) and part.dropout == 0)
            for part in self.model.modules()
        )

    def _can_hook(
        self, forward: Forward, task: Task, inputs: Batch, names: tuple[str, ...]
    ) -> bool:
        device, size = next(iter(inputs.values())).device, inputs.size
        if isinstance(task, TrakTask) or torch.is_autocast_enabled(device.type):
            return False
        if self._is_training():
            return False  # dropout must be independent for each sample
        n = min(_CHECKED, size)
        # A first batch of one sample proves little: a larger one is compared again.
        if self._hooks_agree and n > self._n_checked:
            few = Batch({name: tensor[:n] for name, tensor in inputs.items()})
            self._n_checked, why_not = n, ""
            try:
                with torch.enable_grad():
                    require_same_as_loop("hooks", forward, task, few, names)
            except Exception as err:  # vmap runs instead, and raises an error if it fails, too
                self._hooks_agree, why_not = False, f": {type(err).__name__}: {err}"
            self.logger.debug("Gradients by %s%s", "vmap" if why_not else "hooks", why_not)
        return self._hooks_agree


class IterativeGradientComputer(FunctionalGradientComputer):
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
    TypeError
        If ``task`` is a built-in output for :class:`FunctionalGradientComputer`.
    ValueError
        If ``grad_wrt`` names a parameter that the model lacks, or none.
    """

    def load_model_params(self, model: nn.Module) -> None:
        """Use a model and its parameters."""
        self.model = model
        selected = selected_parameters(dict(model.named_parameters()), self.grad_wrt)
        self.model_params: list[Tensor] = list(selected.values())

    def compute_per_sample_grad(  # type: ignore[override]
        self, batch: Iterable[Tensor]
    ) -> Tensor:
        """Return the gradient of every sample's model output.

        Parameters
        ----------
        batch
            The tensors that the model output takes, each with the samples along its first axis.

        Returns
        -------
        (batch, parameters) in the order of ``model.named_parameters()``, float32, or float64 where
        a parameter is; zero where a parameter has no effect.
        """
        params = self.model_params
        with torch.enable_grad():
            outputs: Tensor = self.modelout_fn.get_output(self.model, None, None, *batch)
            dtype = functools.reduce(torch.promote_types, [p.dtype for p in params], torch.float32)
            width = sum(parameter.numel() for parameter in params)
            gradients = outputs.new_empty((len(outputs), width), dtype=dtype, requires_grad=False)
            for i, output in enumerate(outputs):
                # All samples share one graph, which the last pass through it may free.
                is_last = i + 1 == len(outputs)
                of_sample = torch.autograd.grad(
                    output, params, retain_graph=not is_last, materialize_grads=True
                )
                gradients[i] = torch.cat([gradient.reshape(-1).to(dtype) for gradient in of_sample])
        return gradients


def selected_parameters(
    weights: Mapping[str, Tensor], names: Sequence[str] | None
) -> dict[str, Tensor]:
    """Return the parameters to differentiate with respect to, in the order of the model."""
    if names is None:
        return dict(weights)
    if not names or not set(names) <= set(weights):
        raise ValueError(
            f"expected names of parameters in grad_wrt, got {list(names)}; try some of "
            f"{list(weights)[:5]}, or None for all"
        )
    # In the order of the model, because the projector has a row for each element in that order.
    return {name: tensor for name, tensor in weights.items() if name in names}
