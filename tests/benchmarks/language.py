"""Features of sequences of a GPT-like model per second, beside a plain pass and the original.

    taskset -c 1 python tests/benchmarks/language.py

Everything runs in one process on one thread, in turns: a forward and backward pass of the batch, as
in training; ``td.featurize`` with two projectors; and ``traker==0.3.2``, where it is installed.
Printed are CPU seconds per sequence, which other processes of the machine disturb less than they do
the clock, and their ratio to the plain pass.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from _models import Gpt
from torch import Tensor, nn

import trakdask as td

TASK = td.tasks.CausalLM(inputs="input_ids", positional=True)


def margins(model: nn.Module, weights: dict, buffers: dict, ids: Tensor) -> Tensor:
    logits = torch.func.functional_call(model, (weights, buffers), args=(ids[:, :-1],))
    target = ids[:, 1:, None]
    actual = logits.gather(2, target)[..., 0]
    others = logits.scatter(2, target, -torch.inf).logsumexp(-1)
    return actual - others


def language_task() -> object:
    """The task of td.tasks.CausalLM in the form of the original package."""
    from trak.modelout_functions import AbstractModelOutput

    class Language(AbstractModelOutput):
        def __init__(self) -> None:
            pass

        @staticmethod
        def get_output(model, weights, buffers, ids):  # type: ignore[no-untyped-def]
            return margins(model, weights, buffers, ids[None]).sum()

        def get_out_to_loss_grad(self, model, weights, buffers, batch):  # type: ignore[no-untyped-def]
            found = margins(model, weights, buffers, batch[0])
            return torch.sigmoid(-found).mean(1).detach()[:, None]

    return Language()


def plain(net: nn.Module, ids: Tensor) -> Callable[[], object]:
    weights = {name: tensor.detach().requires_grad_() for name, tensor in net.named_parameters()}
    return lambda: torch.autograd.grad(margins(net, weights, {}, ids).sum(), list(weights.values()))


def featurize(net: nn.Module, ids: Tensor, projector: td.Projector) -> Callable[[], object]:
    model = td.Model(Gpt, [net.state_dict()], task=TASK)
    samples = td.from_arrays({"input_ids": ids.numpy()}, chunks=len(ids))
    features = td.featurize(samples, model, projector=projector)
    return lambda: features.compute(scheduler="sync")


@contextmanager
def original(
    net: nn.Module, ids: Tensor, proj_dim: int, calls: int
) -> Iterator[Callable[[], object]]:
    from trak import TRAKer

    with tempfile.TemporaryDirectory() as folder:
        traker = TRAKer(
            model=net,
            task=language_task(),
            train_set_size=len(ids) * calls,
            save_dir=folder,
            device="cpu",
            proj_dim=proj_dim,
            use_half_precision=False,
            logging_level=100,
        )
        traker.load_checkpoint(net.state_dict(), model_id=0)
        # Each call is given the next numbers, because it would skip samples that are done.
        yield lambda: traker.featurize(batch=(ids,), num_samples=len(ids))


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def table(runs: dict[str, Callable[[], object]], turns: int, n: int) -> None:
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 1):
        for name, run in runs.items():
            taken = seconds(run)
            if turn:  # the first one checks the model and compiles
                found[name].append(taken / n)
    medians = {name: statistics.median(each) for name, each in found.items()}
    print(f"{'':<24}{'CPU s / sequence':>18}{'times plain':>14}")
    for name, value in medians.items():
        print(f"{name:<24}{value:>18.4f}{value / medians['plain pass']:>14.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--proj-dim", type=int, default=512)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--without-traker", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = Gpt().eval()
    ids = torch.randint(0, 1000, (options.sequences, 128))
    p = options.proj_dim
    print(f"{sum(each.numel() for each in net.parameters())} parameters, 128 tokens, proj_dim {p}")
    runs = {
        "plain pass": plain(net, ids),
        "td.featurize, SJLT": featurize(net, ids, td.SJLT(p)),
        "td.featurize, Rademacher": featurize(net, ids, td.Rademacher(p)),
    }
    if options.without_traker:
        table(runs, options.turns, options.sequences)
        return
    with original(net, ids, p, options.turns + 1) as run:
        table(runs | {"traker 0.3.2": run}, options.turns, options.sequences)


if __name__ == "__main__":
    main()
