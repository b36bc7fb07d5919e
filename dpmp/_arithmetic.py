"""Which arithmetic a sum of clipped gradients has, and which engine it goes with."""

import math
from typing import Any

from dpmp import _accumulation, _validate
from dpmp._accumulation import Accumulator
from dpmp._bounded import BoundedGrid
from dpmp._clip_norms import ClipNorms
from dpmp._grid import DEFAULT_RESOLUTION, LARGEST_RESOLUTION, Grid

_METHODS = ("per_example", "book_keeping")
_ON_GRIDS = ("exact", "bounded")


def check_method(
    method: str, accumulator: str | None, pre_clipping_transform: Any = None
) -> None:
    """Raises ValueError for an engine that cannot do what is asked for."""
    _validate.require(
        method in _METHODS,
        f"method must be one of {list(_METHODS)}",
        method=method,
        fix='Use "book_keeping" for speed, "per_example" for exact sums.',
    )
    is_book_keeping = method == "book_keeping"
    _validate.require(
        accumulator != "exact" or not is_book_keeping,
        "exact sums need gradients that are there to be rounded and checked",
        method=method,
        accumulator=accumulator,
        fix='Use "bounded" in its place (in DPSGD: arithmetic="bounded"), or '
        'method="per_example".',
    )
    _validate.require(
        accumulator != "bounded" or is_book_keeping,
        '"bounded" sums are for gradients that are never formed',
        method=method,
        accumulator=accumulator,
        fix='Use "exact", or method="book_keeping".',
    )
    _validate.require(
        pre_clipping_transform is None or not is_book_keeping,
        "pre_clipping_transform needs gradients that are there to be transformed",
        method=method,
        fix='Use method="per_example", or make it a part of the loss.',
    )


def get_arithmetic(
    name: str | None,
    *,
    dtype: Any,
    resolution: int | None,
    clip_norms: ClipNorms,
    nan_safe: bool,
) -> Accumulator | Grid | BoundedGrid:
    """The arithmetic of sums; see `clipped_grad` for the arguments.

    Raises:
      ValueError: for arguments that do not go together, or are out of range.
    """
    is_on_grid = name in _ON_GRIDS
    _validate.require(
        dtype is None if is_on_grid else resolution is None,
        'dtype goes with float sums, and resolution with "exact" and "bounded"',
        accumulator=name,
        dtype=dtype,
        resolution=resolution,
        fix="Leave out the other one.",
    )
    if not is_on_grid:
        return _accumulation.get_accumulator(name, dtype)
    default = DEFAULT_RESOLUTION if name == "exact" else LARGEST_RESOLUTION
    grid = Grid.from_bounds(
        [bound for bound, _ in clip_norms.targets],
        clip_norms.l2_norm_bound if nan_safe else math.inf,
        default if resolution is None else resolution,
    )
    return grid if name == "exact" else BoundedGrid(grid)
