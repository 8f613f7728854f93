"""Featurize: check the arguments, and return a lazy Dataset of projected gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import xarray as xr

from trakdask.arrays.graphs import plain
from trakdask.execution import memory_limit
from trakdask.featurization.graphs import GraphInputs, lazy_arrays
from trakdask.featurization.preparation import prepare
from trakdask.models.model import Model
from trakdask.projection import Projector
from trakdask.projection.fitted import Fitted
from trakdask.projection.protocol import require_block_fits
from trakdask.provenance import (
    BY_CHECKPOINT,
    FEATURE_SPEC,
    as_text,
    require_comparable,
    require_same,
    spec,
)
from trakdask.samples.sources import ROWS, joined_rows
from trakdask.variables import (
    CHECKPOINT,
    COLUMN,
    PROJ_DIM,
    SAMPLE,
    TRAINED_ON,
    VARIABLES,
    aligned,
    checkpoint_names,
)


def featurize(
    samples: xr.Dataset,
    model: Model,
    projector: Projector | Fitted | None = None,
    *,
    like: xr.Dataset | None = None,
    gradients: Literal["auto", "hooks", "vmap", "loop"] = "auto",
    batch_size: int | Literal["auto"] = "auto",
    dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = None,
    device: str = "auto",
    on_error: Literal["raise", "record"] = "raise",
) -> xr.Dataset:
    """Compute the projected gradient of the model output for every sample and checkpoint.

    φ_c(z) = p^-1/2 · P_cᵀ ∇_θ f(z; θ_c): the features of TRAK. Targets are made ``like`` the
    features of the training samples.

    Parameters
    ----------
    samples
        Dataset with a ``sample`` dimension, from :func:`from_arrays`, :func:`from_torch`,
        :func:`from_dataframe`, or any other. Its variables are model inputs and its coords are
        metadata (a coord that the task names is an input, too). A coord ``trained_on`` (sample,
        checkpoint), bool, says which checkpoints were trained on which samples, where they were not
        trained on all; :func:`trakdask.evaluate.cross_validate` grades scores by it.
    model
        The model whose outputs are attributed.
    projector
        What :func:`fit` returned; or a random one, ``SJLT(proj_dim=2048, seed=0)`` by default: four
        random signs per gradient element. For another size, ``td.SJLT(proj_dim=4096)``.
    like
        Features that these are to be multiplied with, as :func:`open` returns them, in the place of
        a projector: the same one, with its fitted values, is taken from them, and so are their
        checkpoints, ``gradients`` and ``dtype``. A model of other checkpoints alone makes features
        that can be appended to these, if the projector is random.
    gradients
        Engine of the per-sample gradients: ``"hooks"``, one batched backward pass in the memory of
        one layer; ``"vmap"``, ``torch.func`` on single samples; ``"loop"``, one backward pass per
        sample, for models that the others cannot run. ``"auto"`` tries them in this order, and
        begins with vmap if hooks can handle no selected parameter; the first one and the reason
        for it are in ``attrs``. If an engine fails for a micro-batch, or fails the checks below,
        and a later one runs all of its samples, the thread goes on by that. One warning in the log
        says why, and how much slower that is; gradients are the same but for rounding. A model that
        mixes the samples of a batch is refused, whatever the engine. Each thread checks the
        gradients of its first (and of any larger) micro-batch by a random weighted sum, which one
        plain backward pass gives, too. In every later block, it compares f, Q and the gradient of
        one sample with what the sample alone gives, which costs a backward pass of one sample.
    batch_size
        Most samples per micro-batch inside a task. With ``"auto"`` the gradients of a micro-batch
        fit in 256 MB, and it has at most 256 samples. With hooks, the gradients of the largest
        parameter fit in 64 MB, or it has 32 samples if that takes at most 1 GB; gradients of linear
        and embedding layers are computed in slices.
        Activations, measured on two samples, and gradients of a micro-batch always fit in half of
        the memory of a task and, on a CPU, in 96 MiB or, for large models, in 8 times the size of
        the weights. The batch size does not change features, given the same gradients.
        If memory runs out, the micro-batch is halved.
    dtype
        Precision in which the model runs: floating-point weights, buffers and inputs are cast to
        it. By default they are used as they are. Output and Q are always float32. Tasks also use
        the settings of ``torch.autocast`` and ``torch.set_float32_matmul_precision`` that are
        active where featurize is called. All of these are recorded in ``attrs``.
    device
        Device of torch on which gradients are computed and projected: ``"auto"``, ``"cpu"``,
        ``"cuda"`` (also AMD's), ``"xpu"``, ``"mps"``, or one of several, such as ``"cuda:1"``.
        ``"auto"`` is an accelerator of the worker that runs a task, if torch sees one, else its
        CPU; the log says which. Results are in host memory. Start one worker process per GPU, as
        ``dask_cuda.LocalCUDACluster`` does. **This has not run on a GPU yet.** Projections are
        meant to have the bits of the CPU on all of them, and to be faster with CuPy
        (``pip install 'trakdask[cuda]'``) on NVIDIA's.
    on_error
        What to do with a sample whose output, gradient or Q is not finite, or for which the model
        raises an error (located by halving its micro-batch). ``"raise"``: the block fails.
        ``"record"``: all three are NaN at that checkpoint, ``error`` states the reason, and later
        computations leave the sample out. Errors of files, memory and devices are always raised,
        and so is an error of every sample of a block of two or more, which indicates a mistake in
        the setup.

    Returns
    -------
    Lazy Dataset with the samples' coords, a ``checkpoint`` coord, and float32 variables

    - ``feature`` (sample, proj_dim, checkpoint), chunks (sample block, proj_dim, 1);
    - ``feature_norm`` (sample, checkpoint): ‖φ‖², float64, large for outliers; scores compare it
      with features that are not read from a store, before they use its gram matrix;
    - ``output`` (sample, checkpoint): f itself;
    - ``out_to_loss`` (sample, checkpoint): Q, 1 - p for classification;
    - ``trained_on`` (sample, checkpoint), bool, if the samples have it;
    - with ``on_error="record"``, ``error`` (sample, checkpoint): text, "" for samples that
      did not fail. :func:`open` returns it as a coord;
    - the values of a fitted projector, (..., checkpoint), which ``like=`` takes from here, and
      ``wrong_classes`` (proj_dim, proj_dim_1, checkpoint), if :func:`fit` made it.

    Its ``attrs`` record how it was computed.

    Raises
    ------
    TypeError, ValueError
        If the samples lack a variable that the task needs, the features of one block cannot fit in
        the memory of a worker, or an option is invalid.
    StoreMismatchError
        If the projector was fitted to another model, or the model is not the one of ``like``.
    BlockError
        When computed, naming the samples and the checkpoint that failed: labels that are out of
        range, inputs that a layer cannot process, gradients that are not finite, or a model that
        mixes the samples of a batch (so that f and Q of a sample depend on the others).

    Notes
    -----
    One task per (sample block × checkpoint) computes all variables, so compute them in one call, or
    better with :func:`save`, which stores every finished block. Memory of a task: inputs and
    features of one block, and gradients of one micro-batch.

    If some workers have a GPU and others do not, the projection of equal gradients has the same
    bits on both. The gradients themselves
    come from torch and differ by rounding: on GPUs, torch uses TF32 for convolutions by default.
    ``attrs["device"]`` is the device that was requested. If workers of the active client declare
    ``resources={"GPU": 1}``, gradients are computed only on these, whoever computes the features,
    unless ``device="cpu"``; everything else runs anywhere. If no worker does, gradients run
    anywhere, too. Features that were made before there was a client do not know this, until another
    call of trakdask has met it.

    References
    ----------
    Park et al. 2023, "TRAK: Attributing Model Behavior at Scale", section 3.

    Examples
    --------
    >>> import numpy as np, torch, trakdask as td
    >>> x = np.ones((4, 2), "f4")
    >>> samples = td.from_arrays({"image": x, "label": np.zeros(4, int)})
    >>> model = td.Model(torch.nn.Linear(2, 3), task="image_classification")
    >>> features = td.featurize(samples, model, td.SJLT(16))  # lazy
    >>> targets = td.featurize(samples.isel(sample=[0]), model, like=features)
    >>> targets.feature.sizes["proj_dim"]
    16

    The failed samples, and the reasons:

    >>> x[2] = np.inf
    >>> samples = td.from_arrays({"image": x, "label": np.zeros(4, int)})
    >>> features = td.featurize(samples, model, projector=td.Identity(), on_error="record")
    >>> error = features.error.isel(checkpoint=0).compute()
    >>> error[error != ""].values.tolist()
    ['the output is NaN or infinite']
    """
    # 1. All that is known before anything runs.
    prepared = prepare(
        samples,
        model,
        projector=projector,
        like=like,
        gradients=gradients,
        batch_size=batch_size,
        dtype=dtype,
        device=device,
        on_error=on_error,
    )
    # 2. Blocks as from_arrays made them may be joined. Their size tells, because the attr stays
    # when somebody rechunks samples.
    if samples.attrs.get("chunks") == "auto" and max(prepared.rows) == ROWS:
        prepared = _joined(prepared)
    job, n_samples = prepared.job, max(prepared.rows)
    require_block_fits(job.projector.projector, job.row_map.n_rows, n_samples, memory_limit())
    # 3. The graph, as a Dataset. Each column knows its number, so that nobody takes a selection of
    # columns for all of them.
    arrays = lazy_arrays(prepared) | prepared.fit
    data = {name: VARIABLES[name].holding(array) for name, array in arrays.items()}
    coords = {**prepared.coords, COLUMN: (PROJ_DIM, np.arange(job.proj_dim))}
    features = xr.Dataset(data, coords=coords, attrs=as_text(prepared.attrs))
    if TRAINED_ON in samples.coords:
        features[TRAINED_ON] = _trained_on(samples, features)
    # 4. Features that are like others can be multiplied with them, or appended to them.
    if like is not None:
        if {*checkpoint_names(like)} & {*checkpoint_names(features)}:
            require_comparable(like, features, "these")
        else:  # of other checkpoints, to be appended to these
            same = tuple(name for name in FEATURE_SPEC if name not in BY_CHECKPOINT)
            require_same(spec(features), spec(like), what="these and training features", names=same)
    return features


def _joined(prepared: GraphInputs) -> GraphInputs:
    """Return the inputs of a graph in larger blocks, if features of a block have few bytes."""
    n, inputs = sum(prepared.rows), prepared.inputs
    n_bytes = int(sum(array.nbytes for array in inputs.values())) // n
    rows = joined_rows(n, 4 * prepared.job.proj_dim, n_bytes)
    # A cluster would shuffle all samples by default, where neighbours are to be joined.
    joined = {name: a.rechunk({0: rows}, method="tasks") for name, a in inputs.items()}
    return replace(prepared, inputs=joined)


def _trained_on(samples: xr.Dataset, features: xr.Dataset) -> xr.Variable:
    """Return which checkpoints were trained on the samples, in the chunks of the features."""
    given, sizes = samples[TRAINED_ON], {dim: features.sizes[dim] for dim in (SAMPLE, CHECKPOINT)}
    if CHECKPOINT in given.indexes:
        given = aligned(given, features, what=TRAINED_ON)
    if given.dtype != bool or given.sizes != sizes:
        raise ValueError(
            f"expected {TRAINED_ON!r} as bool {sizes}, got {given.dtype} {dict(given.sizes)}; try "
            "samples.assign_coords(trained_on=masks.rename(subset='checkpoint')), with masks of "
            "td.evaluate.subsets"
        )
    chunks: dict[Any, Any] = {SAMPLE: features.chunksizes[SAMPLE], CHECKPOINT: 1}
    variable = given.variable.transpose(SAMPLE, CHECKPOINT).chunk(chunks)
    return xr.Variable(variable.dims, plain(variable.data), VARIABLES[TRAINED_ON].attrs)
