"""Features of padded sequences with and without computing on their padding.

    python tests/benchmarks/language_models.py [--samples 192 --length 512 --hidden 64 ...]

The sequences are docstrings of the standard library, one token per byte, padded on the right to one
length. The model is a random Llama. Both ways give the same features, up to rounding. CPU seconds
are of this process with one thread, so that a loaded machine changes them little.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import platform
import sys
import time
import warnings

import dask
import numpy as np
import pandas as pd
import torch
import transformers
import xarray as xr

import trakdask as td

MODULES = ("argparse", "asyncio", "collections", "datetime", "email.message", "http.client")
MODULES += ("logging", "pathlib", "pickle", "random", "socket", "statistics", "threading", "typing")


class WholeRows(td.tasks.CausalLM):
    """The same task, but with no variable whose padding could be cut."""

    token_variables = ()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    samples = padded_docstrings(args)
    mask = samples.attention_mask.values
    seconds: dict[str, float] = {}
    found: dict[str, xr.Dataset] = {}
    with dask.config.set(scheduler="sync"):
        for name, task in (("whole rows", WholeRows()), ("trimmed", td.tasks.CausalLM())):
            model = td.Model(lambda: llama(args), [llama(args).state_dict()], task=task)
            features = td.featurize(
                samples, model, projector=td.SJLT(proj_dim=512), batch_size=args.batch
            )
            features.isel(sample=slice(args.batch)).compute()  # the checks of the first block
            start = time.process_time()
            found[name] = features.compute()
            seconds[name] = time.process_time() - start
    report(args, mask, seconds)
    left, right = (found[name].feature.values for name in seconds)
    error = np.linalg.norm(left - right) / np.linalg.norm(left)
    print(f"relative difference of the features: {error:.1e}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=192)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    return parser.parse_args()


def llama(args: argparse.Namespace) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=args.length,
    )
    return transformers.LlamaForCausalLM(config)


def padded_docstrings(args: argparse.Namespace) -> xr.Dataset:
    tokens = [list(text.encode()) for text in docstrings()]
    random = np.random.default_rng(0)
    chosen = [tokens[i] for i in random.permutation(len(tokens))[: args.samples]]
    return td.from_dataframe(
        pd.DataFrame({"tokens": chosen}),
        variables={"input_ids": "tokens"},
        max_length=args.length,
        truncate=True,
        chunks=args.samples,
    )


def docstrings() -> list[str]:
    found = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in map(importlib.import_module, MODULES):
            for thing in (module, *vars(module).values()):
                members = vars(thing).values() if inspect.isclass(thing) else ()
                found |= {inspect.getdoc(each) for each in (thing, *members) if callable(each)}
    return sorted(text for text in found if text and len(text) > 3)


def report(args: argparse.Namespace, mask: np.ndarray, seconds: dict[str, float]) -> None:
    print(
        f"{len(mask)} docstrings of Python {platform.python_version()}, {int(mask.sum())} tokens, "
        f"padded to {mask.size} ({mask.size / mask.sum():.2f} times as many); Llama of "
        f"{args.layers} layers, width {args.hidden}; batches of {args.batch}"
    )
    print(f"{platform.machine()}, {sys.platform}, torch {torch.__version__}")
    for name, value in seconds.items():
        print(f"{name:>10}: {value:7.2f} CPU seconds")
    whole, trimmed = seconds.values()
    print(f"{whole / trimmed:.2f} times as fast without padding")


if __name__ == "__main__":
    main()
