"""Which arithmetic a sum of clipped gradients has, and which engine it goes with."""

import dataclasses
import math
from typing import Any

from dpmp import _validate
from dpmp.numerics import _float_sums
from dpmp.numerics._bounded import BoundedGrid
from dpmp.numerics._float_sums import Accumulator
from dpmp.numerics._grid import DEFAULT_RESOLUTION, LARGEST_RESOLUTION, Grid

_METHODS = ("per_example", "book_keeping")
_ON_GRIDS = ("exact", "bounded")

# Float sums of book-keeping: whoever uses them says that nothing is proved.
_UNPROVED = "unproved_"


def choose_arithmetic(method: str, name: str | None, dtype: Any) -> str | None:
    """The arithmetic of `clipped_grad`: the one that is given, or what is proved."""
    if method != "book_keeping" or name is not None:
        return name
    _validate.require(
        dtype is None,
        "book-keeping has no proved sums of a float dtype",
        dtype=dtype,
        fix='Leave dtype out for "bounded" sums, or say accumulator="unproved_float32" '
        'or "unproved_float64", or use method="per_example".',
    )
    return "bounded"


def default_arithmetic(method: str) -> str:
    """The arithmetic of `DPSGD` for a gradient engine."""
    return "bounded" if method == "book_keeping" else "exact"


def float_arithmetic(method: str) -> str:
    """Where nothing is to be private."""
    return f"{_UNPROVED}float32" if method == "book_keeping" else "float32"


def float_accumulator(name: str | None, dtype: Any = None) -> Accumulator:
    """The accumulator for the name of a float arithmetic, proved or not."""
    proved = name and name.removeprefix(_UNPROVED)
    accumulator = _float_sums.get_accumulator(proved, dtype)
    return dataclasses.replace(accumulator, name=name or accumulator.name)


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
        not is_book_keeping
        or accumulator == "bounded"
        or str(accumulator).startswith(_UNPROVED),
        "the sensitivity of float sums is not proved in book-keeping",
        method=method,
        accumulator=accumulator,
        fix='Use "bounded", which is, or method="per_example"; or say that you know: '
        f'"{_UNPROVED}float32", "{_UNPROVED}float32x2" or "{_UNPROVED}float64".',
    )
    _validate.require(
        is_book_keeping or not str(accumulator).startswith(_UNPROVED),
        "float sums of gradients that are formed are proved",
        method=method,
        accumulator=accumulator,
        fix=f'Use the name without "{_UNPROVED}", or method="book_keeping".',
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
    bounds: list[float],
    l2_norm_bound: float,
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
        return float_accumulator(name, dtype)
    default = DEFAULT_RESOLUTION if name == "exact" else LARGEST_RESOLUTION
    grid = Grid.from_bounds(
        bounds,
        l2_norm_bound if nan_safe else math.inf,
        default if resolution is None else resolution,
    )
    return grid if name == "exact" else BoundedGrid(grid)
