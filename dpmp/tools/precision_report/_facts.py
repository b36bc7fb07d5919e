"""What is known of the values of a program, and where 16 bits lose too much of them."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

# The part of a sum that rounding may take before it is worth telling.
_NOTICEABLE = 1 / 8


class Place(NamedTuple):
    """An equation that loses more than it has to.

    Attributes:
      kind: how it loses that, as in `Finding`.
      primitive: the name of the operation in jax, or the path of an argument.
      dtype: the narrow dtype.
      source: the file and the line.
      length: the number of terms, for sums of a known number of them.
    """

    kind: str
    primitive: str
    dtype: str
    source: tuple[str, int]
    length: int | None = None


class Facts(NamedTuple):
    """What is known of a value.

    Attributes:
      rounded: where a 16-bit value lost the bits of a wider one.
      widened: the same for a wider copy of such a 16-bit value.
      is_tie: whether it tells which floats are equal.
      is_sum: whether it is a sum, possibly with a factor, a root or an addend.
      terms: the number of 16-bit values that it is a sum of.
      carries: the values carried by a loop that are terms of it, by position.
      adds: the number of additions since these were carried.
      source: the file and the line of the last of these additions.
    """

    rounded: Place | None = None
    widened: Place | None = None
    is_tie: bool = False
    is_sum: bool = False
    terms: int = 1
    carries: frozenset[int] = frozenset()
    adds: int = 0
    source: tuple[str, int] = ("unknown", 0)


NOTHING = Facts()


def outside_of_loops(facts: Sequence[Facts]) -> list[Facts]:
    """The facts without the values that loops carry."""
    return [x._replace(carries=frozenset(), adds=0) for x in facts]


def merged(operands: Sequence[Facts]) -> Facts:
    """What is known of entries that come from any of the operands."""
    carriers = [x for x in operands if x.carries] or [NOTHING]
    return Facts(
        rounded=_first(x.rounded for x in operands),
        widened=_first(x.widened for x in operands),
        terms=max((x.terms for x in operands), default=1),
        carries=frozenset().union(*(x.carries for x in carriers)),
        adds=max(x.adds for x in carriers),
        source=carriers[-1].source,
    )


def _first(values: Iterator[Any]) -> Any:
    return next((x for x in values if x is not None), None)


def is_narrow(dtype: Any) -> bool:
    """Whether a dtype is a float of 16 bits or fewer."""
    return is_float(dtype) and dtype.itemsize <= 2


def is_wide(dtype: Any) -> bool:
    """Whether a dtype is a float of more than 16 bits."""
    return is_float(dtype) and dtype.itemsize > 2


def is_float(dtype: Any) -> bool:
    """Whether a dtype is a real float. None is not."""
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def rounding_bound(length: int, dtype: Any) -> float:
    """The largest part of a sum of positive terms that rounding takes.

    It is reached if every addition is rounded by half of the dtype's epsilon. The
    typical loss is the root of a third of that many roundings.
    """
    return length * float(jnp.finfo(dtype).eps) / 2


def is_noticeable(length: int | None, dtype: Any) -> bool:
    """Whether rounding may take a good part of a sum; None is any number of terms."""
    return length is None or rounding_bound(length, dtype) >= _NOTICEABLE


def num_terms(eqn: Any) -> int | None:
    """The number of terms of each entry of a result; None for what is no sum.

    For scatters it is the largest number of terms that an entry may have.
    """
    name, params, shape = eqn.primitive.name, eqn.params, eqn.invars[0].aval.shape
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return math.prod(shape[i] for i in contracted)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        return math.prod(kernel) // kernel[params["dimension_numbers"].rhs_spec[0]]
    if name.startswith("ragged_dot"):
        return shape[-1]
    if name.startswith("scatter"):
        batched = params["dimension_numbers"].scatter_indices_batching_dims
        updates = eqn.invars[1].aval.shape[:-1]
        sizes = [n for i, n in enumerate(updates) if i not in batched]
        return 1 if params["unique_indices"] else math.prod(sizes)
    if name == "cumsum":
        return shape[params["axis"]]
    if name == "reduce_window_sum":
        return math.prod(params["window_dimensions"])
    if name == "reduce_sum":
        return math.prod(shape) // max(1, math.prod(eqn.outvars[0].aval.shape))
    return None
