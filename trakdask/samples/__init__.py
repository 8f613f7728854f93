"""Create lazy Datasets of samples: model inputs as variables, metadata as coords.

``from_dataframe`` is imported from its module, because ``dask.dataframe`` takes a while to import.
"""

from trakdask.samples.array_source import from_arrays, lazy_variables, validate_samples
from trakdask.samples.computed_elsewhere import from_features
from trakdask.samples.coords import normalise_coord, normalise_coords
from trakdask.samples.datasets import drawn, source_of
from trakdask.samples.sources import ROWS, joined_rows
from trakdask.samples.torch_source import from_torch

__all__ = [
    "ROWS",
    "drawn",
    "from_arrays",
    "from_features",
    "from_torch",
    "joined_rows",
    "lazy_variables",
    "normalise_coord",
    "normalise_coords",
    "source_of",
    "validate_samples",
]
