"""The arithmetics by name, and the choice of one.

    arithmetic = parse_arithmetic("exact", method="per_example")

No other module compares names of arithmetics, or asks for the type of the object.
"""

from typing import Any

import numpy as np

from dpmp import _validate
from dpmp.numerics._bounded import BoundedSums
from dpmp.numerics._exact import ExactSums
from dpmp.numerics._float_sums import FLOAT_SUMS, UNPROVED, FloatSums
from dpmp.numerics._interface import Arithmetic

ARITHMETICS: dict[str, Arithmetic] = {
    x.name: x for x in (ExactSums(), BoundedSums(), *FLOAT_SUMS)
}


def parse_arithmetic(
    arithmetic: str | Arithmetic | None,
    *,
    method: str = "per_example",
    dtype: Any = None,
) -> Arithmetic:
    """Makes the arithmetic of `clipped_grad`; see there for the arguments."""
    dtype_name = None if dtype is None else _name_of(dtype)
    if arithmetic is None:
        default = "bounded" if method == "book_keeping" else "float32"
        arithmetic = dtype_name or default
    sums = ARITHMETICS.get(arithmetic) if isinstance(arithmetic, str) else arithmetic
    if not isinstance(sums, Arithmetic):
        _validate.fail(
            f"arithmetic must be one of {list(ARITHMETICS)}. Use one of these names.",
            arithmetic=arithmetic,
        )
    if method != sums.method:
        _validate.fail(
            f'"{sums.name}" sums must be used with method="{sums.method}"',
            method=method,
            fix="Book-keeping does not materialize most per-example gradients. Use "
            '"bounded" sums there, which have a proof for that. Or use sums without a '
            "proof: "
            f'"{UNPROVED}". All others are for method="per_example".',
        )
    if dtype is not None and (
        not isinstance(sums, FloatSums) or dtype_name != sums.dtype.name
    ):
        _validate.fail(
            "dtype must be that of float sums. Leave dtype out. (Rounding a wide sum "
            "before the noise would undo it.)",
            arithmetic=sums.name,
            dtype=dtype,
        )
    sums.check_mode()
    return sums


def _name_of(dtype: Any) -> str:
    try:
        name = np.dtype(dtype).name
    except (TypeError, ValueError):
        name = dtype
    if name not in ("float32", "float64"):
        _validate.fail(
            "dtype must be float32 or float64. Leave dtype out: half-precision norms "
            "and sums break the clipping bound, and only the model's own arithmetic "
            "may be narrower.",
            dtype=name,
        )
    return name


def default_method(arithmetic: str | None, *, has_fixed_slots: bool) -> str:
    """The engine of an arithmetic; for None, the fastest one whose sums are proved."""
    if arithmetic in ARITHMETICS:
        return ARITHMETICS[arithmetic].method
    return "book_keeping" if has_fixed_slots else "per_example"


def default_arithmetic(method: str) -> str:
    """The name of the default arithmetic of `DPSGD`."""
    return "bounded" if method == "book_keeping" else "exact"


def arithmetic_without_privacy(method: str) -> str:
    """The name of the arithmetic for training without clipping."""
    return UNPROVED if method == "book_keeping" else "float32"
