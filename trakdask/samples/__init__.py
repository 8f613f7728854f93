"""Create lazy Datasets of samples: model inputs as variables, metadata as coords."""

from trakdask.samples.array_source import from_arrays, lazy_variables
from trakdask.samples.blocks import source_of
from trakdask.samples.coords import normalise_coord, normalise_coords
from trakdask.samples.dataframe_source import from_dataframe
from trakdask.samples.torch_source import from_torch
from trakdask.samples.validation import validate_samples

__all__ = [
    "from_arrays",
    "from_dataframe",
    "from_torch",
    "lazy_variables",
    "normalise_coord",
    "normalise_coords",
    "source_of",
    "validate_samples",
]
