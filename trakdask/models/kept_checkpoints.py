"""A callback that keeps checkpoints, learning rates and Adam's second moments during training."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file, save_model
from torch import Tensor

from trakdask.checks import require_flags, require_integer
from trakdask.files import Folder, is_url, replacing
from trakdask.models.checkpoints import checkpoint_folders

__all__ = ["keep_checkpoints"]

MOMENTS_FILE = "second_moments.safetensors"
_RATES_FILE = "learning_rates.json"
_SHARDED = ("deepspeed", "fsdp")
REMEDY = "try td.keep_checkpoints(folder, second_moments=True) while you train"


def keep_checkpoints(
    folder: str | os.PathLike[str],
    *,
    every: Literal["save", "epoch"] | int = "save",
    second_moments: bool = False,
) -> _Keeper:
    """Return a callback for ``transformers.Trainer`` that keeps weights and learning rates.

    Parameters
    ----------
    folder
        Path of a local folder for one run. It is created.
    every
        When to keep a checkpoint: ``"save"``, whenever ``Trainer`` saves; ``"epoch"``, at the end
        of each epoch; or a number of steps.
    second_moments
        Whether to keep Adam's second moments as well, corrected for their bias, by the names of
        the parameters, for :func:`~trakdask.fits.second_moments`.

    Returns
    -------
    The callback, for ``Trainer(..., callbacks=[...])``. While the model is trained it writes

    - ``checkpoint-<step>``: the weights as ``save_pretrained`` writes them (a PEFT model writes its
      adapter), without the state of the optimizer, which is two thirds of ``Trainer``'s bytes with
      Adam;
    - ``learning_rates.json``: by checkpoint, the mean learning rate of the steps since the one
      before it, for :class:`TracIn`.

    Raises
    ------
    TypeError, ValueError
        If ``folder`` or ``every`` is invalid.
    FileExistsError
        When training starts, if the folder has checkpoints and this run does not continue one.
    NotImplementedError
        When training starts, if DeepSpeed or FSDP distributes the weights over processes. When the
        first checkpoint is kept, with ``second_moments``, if the optimizer has none.

    Notes
    -----
    A checkpoint gets its name when it is whole, so one that a killed run has left is never read.
    Where several processes train, the first one writes. ``Trainer``'s ``save_total_limit`` does not
    remove checkpoints here. The learning rate is the one of the optimizer's first group of
    parameters.

    References
    ----------
    Pruthi et al. 2020, "Estimating Training Data Influence by Tracing Gradient Descent" (TracIn:
    checkpoints weighted by their learning rates); Xia et al. 2024, "LESS", section 3 (the mean
    learning rate since the last checkpoint).

    Examples
    --------
    After ``Trainer(..., callbacks=[td.keep_checkpoints("run", every="epoch")]).train()``::

        model = td.Model(build, checkpoints="run", task="causal_lm")
        rates = json.loads(Path("run/learning_rates.json").read_text())
        td.score(features, targets, td.TracIn(rates))
    """
    if is_url(str(folder)):
        raise ValueError(
            f"expected a local folder, got the URL {str(folder)!r}; try a path, and copying it "
            "after the training"
        )
    if every not in ("save", "epoch") or isinstance(every, bool):
        every = require_integer("every", every, 1, remedy="try every='save', 'epoch' or 500")
    require_flags(second_moments=second_moments)
    return _Keeper(Path(folder), every, second_moments)


class _Keeper:
    """A callback of ``Trainer``, which looks methods up by name: transformers is not imported."""

    def __init__(self, folder: Path, every: str | int, second_moments: bool) -> None:
        self.folder = folder
        self.every = every
        self.second_moments = second_moments
        self._files = Folder(str(folder.absolute()))
        self._rates: dict[str, float] = {}
        self._since: list[float] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        # Trainer calls a callback at every event, and does not ask which methods it has. Other
        # names must be missing, because copy and pickle look some up that begin with two
        # underscores.
        if name.startswith("on_"):
            return lambda *args, **kwargs: None  # at other events
        raise AttributeError(name)

    def on_train_begin(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Read the learning rates of the run that this one continues; refuse sharded weights."""
        sharded = [name for name in _SHARDED if getattr(args, name, None)]
        if sharded:
            raise NotImplementedError(
                f"expected whole weights in one process, got training with {sharded[0]}; try "
                "td.Model(build, checkpoints=args.output_dir)"
            )
        kept = [Path(url).name for url in checkpoint_folders(self._files)]
        # A run that continues another one begins with the step of the checkpoint that it resumed
        # from.
        if kept and not state.global_step:
            raise FileExistsError(
                f"expected no checkpoints in {str(self.folder)!r} at the start of a run, got "
                f"{kept[:3]}; try another folder, or trainer.train(resume_from_checkpoint=True)"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        is_there = kept and (self.folder / _RATES_FILE).exists()
        self._rates = self._files.read_json(_RATES_FILE) if is_there else {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Note the learning rate of the step."""
        # Before the step: afterwards, the scheduler has set the rate of the next one.
        self._since.append(float(context["optimizer"].param_groups[0]["lr"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Keep a checkpoint after every so many steps."""
        if isinstance(self.every, int) and state.global_step % self.every == 0:
            self._keep(state, context["model"], context["optimizer"])

    def on_epoch_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Keep a checkpoint after an epoch."""
        if self.every == "epoch":
            self._keep(state, context["model"], context["optimizer"])

    def on_save(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Keep a checkpoint beside the one that ``Trainer`` has saved."""
        if self.every == "save":
            self._keep(state, context["model"], context["optimizer"])

    def _keep(self, state: Any, model: Any, optimizer: Any) -> None:
        name = f"checkpoint-{state.global_step}"
        rates, self._since = self._since, []
        # Without a step since the last checkpoint, there is nothing new to keep.
        if not state.is_world_process_zero or not rates:
            return
        # The run that this one continues may have kept this checkpoint, too.
        # The name of the unfinished folder begins with a point, so checkpoint_folders ignores it.
        with replacing(self.folder / name, partial=self.folder / f".{name}.partial") as partial:
            partial.mkdir()
            if hasattr(model, "save_pretrained"):
                model.save_pretrained(partial)
            else:
                # Unlike save_file it accepts tied weights, of which it writes one name.
                save_model(model, str(partial / "model.safetensors"))
            if self.second_moments:
                save_file(_moments(model, optimizer), partial / MOMENTS_FILE)
        self._rates[name] = sum(rates) / len(rates)
        self._files.write(_RATES_FILE, json.dumps(self._rates, indent=1).encode())


def _moments(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Return Adam's second moments by the names of the parameters, corrected for their bias."""
    betas = {id(p): group.get("betas") for group in optimizer.param_groups for p in group["params"]}
    by_name = {}
    for name, parameter in model.named_parameters():
        # Parameters that are frozen, or had no gradient so far, have no state.
        state = optimizer.state.get(parameter, {})
        if "exp_avg_sq" in state:
            _, beta = betas[id(parameter)]
            moments = state["exp_avg_sq"].detach().to(torch.float32)
            # A running mean that started from 0 is too small by this factor after so many steps.
            by_name[name] = (moments / (1 - beta ** float(state["step"]))).cpu().contiguous()
    if not by_name:
        raise NotImplementedError(
            "expected Adam's second moments ('exp_avg_sq'), got the optimizer "
            f"{type(getattr(optimizer, 'optimizer', optimizer)).__name__}; try optim='adamw_torch'"
        )
    return by_name
