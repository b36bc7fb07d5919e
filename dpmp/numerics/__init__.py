"""Sums of clipped gradients: in integers, or in floats whose rounding is bounded.

No module here knows of privacy. Modules import only from rows below their own:

    _arithmetic
    _bounded   _exact
    _float_sums   _grid
    _interface
    reduction
    packing
"""

from dpmp._fence import (
    StoredArray,
    at_least_float32,
    compute_and_store,
    floats_of,
)
from dpmp.numerics import packing, reduction
from dpmp.numerics._arithmetic import (
    arithmetic_without_privacy,
    default_arithmetic,
    default_method,
    parse_arithmetic,
)
from dpmp.numerics._bounded import (
    FLOOR,
    BoundedSums,
    Roundings,
    group_size,
    largest_condition_number,
    norm_bound_for_clipping,
)
from dpmp.numerics._exact import ExactSums
from dpmp.numerics._grid import (
    DEFAULT_RESOLUTION,
    LARGEST_RESOLUTION,
    LARGEST_ROUNDING_SHARE,
    GridArray,
    Sum,
    flatten_before_noise,
    is_grid,
    num_entries,
    round_to_grid,
    to_float,
    unit_of,
)
from dpmp.numerics._interface import Arithmetic, GradientSums, PartialSums
from dpmp.numerics.reduction import (
    UNIT_ROUNDOFF,
    SquaredNorm,
    indices_of_block,
    rows_of_block,
    squared_norm,
)

__all__ = [
    "DEFAULT_RESOLUTION",
    "FLOOR",
    "LARGEST_RESOLUTION",
    "LARGEST_ROUNDING_SHARE",
    "UNIT_ROUNDOFF",
    "Arithmetic",
    "BoundedSums",
    "ExactSums",
    "GradientSums",
    "GridArray",
    "PartialSums",
    "Roundings",
    "SquaredNorm",
    "StoredArray",
    "Sum",
    "arithmetic_without_privacy",
    "at_least_float32",
    "compute_and_store",
    "default_arithmetic",
    "default_method",
    "flatten_before_noise",
    "floats_of",
    "group_size",
    "indices_of_block",
    "is_grid",
    "largest_condition_number",
    "norm_bound_for_clipping",
    "num_entries",
    "packing",
    "parse_arithmetic",
    "reduction",
    "round_to_grid",
    "rows_of_block",
    "squared_norm",
    "to_float",
    "unit_of",
]
