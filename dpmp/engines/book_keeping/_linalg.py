"""Products of arrays in fast forms, and sums of squares with few roundings.

For a product with a bfloat16 result, XLA's CPU compiler widens both operands. It uses
the matrix units of the processor only if the result is float32. Accelerators sum in
float32 in any case. So nothing is lost by asking for a float32 result and rounding it
once. On a processor with matrix units this is several times faster.

Book-keeping treats an example as a batch of one. If the axis of that batch is a batch
axis of a product, the same compiler writes transpositions as concatenations of slices,
which take seconds to compile. So products are taken without such axes.

Sums of squares have few roundings on any path: the compiler adds up rows of about
sqrt(n) entries, in an order of its choice. A tree of elementwise additions then adds up
the sums of all rows. The compiler keeps the order of these additions.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dpmp.numerics import at_least_float32
from dpmp.programs import interpreter, primitives
from dpmp.programs.transformations import FAST_CONVOLUTIONS


def adapted(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fun` with its products in the forms above, and fast convolutions.

    On CPUs only, bfloat16 products are computed in float32 and rounded. Batch axes of
    size one are left out on all devices.
    """
    rules = {primitives.DOT_GENERAL: _fast_product, **FAST_CONVOLUTIONS}
    return interpreter.rewrite(fun, rules)


def _fast_product(eqn: Any, values: list[Any]) -> list[Any] | None:
    operands, numbers = _without_batches_of_one(
        values, *eqn.params["dimension_numbers"]
    )
    atoms = (*eqn.invars, *eqn.outvars)
    is_narrow = all(atom.aval.dtype == jnp.bfloat16 for atom in atoms)
    if not is_narrow and operands is values:
        return None

    if is_narrow:
        product = _narrow(*operands, numbers, tuple(sorted(eqn.params.items())))
    else:
        (product,) = interpreter.bind(eqn, operands, dimension_numbers=numbers)
    return [product.reshape(eqn.outvars[0].aval.shape)]


@functools.partial(jax.jit, static_argnums=(2, 3))  # one copy for products of a kind
def _narrow(a: jax.Array, b: jax.Array, numbers: Any, params: Any) -> jax.Array:
    """A bfloat16 product, taken in float32 on CPUs; `params` are sorted pairs."""

    def wide(a: jax.Array, b: jax.Array) -> jax.Array:
        return apart(contract(a, b, *numbers)).astype(jnp.bfloat16)

    def plain(a: jax.Array, b: jax.Array) -> jax.Array:
        others = {k: v for k, v in params if k != "dimension_numbers"}
        return jax.lax.dot_general(a, b, numbers, **others)

    return jax.lax.platform_dependent(a, b, cpu=wide, default=plain)


def _without_batches_of_one(
    operands: list[Any], contracting: Any, batch: Any
) -> tuple[list[Any], Any]:
    """Removes batch axes of size one, and renumbers the axes to contract."""
    removed = [
        [i for i in axes if x.shape[i] == 1]
        for x, axes in zip(operands, batch, strict=True)
    ]
    if removed == [[], []]:
        return operands, (contracting, batch)

    def renumbered(axes: Sequence[int], gone: list[int]) -> tuple[int, ...]:
        return tuple(i - sum(j < i for j in gone) for i in axes if i not in gone)

    smaller = list(map(jax.lax.squeeze, operands, removed))
    numbers = [tuple(map(renumbered, x, removed)) for x in (contracting, batch)]
    return smaller, tuple(numbers)


def contract(
    a: jax.Array, b: jax.Array, contracting: Any, batch: Any = ((), ())
) -> jax.Array:
    """Takes a dot product in float32 or wider, without widening the operands."""
    is_transposed = a.ndim == 2 and tuple(contracting[0]) == (0,)
    if a.dtype == jnp.bfloat16 and (batch[0] or is_transposed):
        # XLA's CPU compiler has code for such products only if the contracted axes come
        # last ("Unsupported element type for DotThunk").
        stored = [i for i in range(a.ndim) if i not in (*batch[0], *contracting[0])]
        order = (*batch[0], *stored, *contracting[0])
        a, b = apart(a.transpose(order)), apart(b)
        contracting = (tuple(map(order.index, contracting[0])), contracting[1])
        batch = (tuple(map(order.index, batch[0])), batch[1])
    return jax.lax.dot_general(
        a,
        b,
        (contracting, batch),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=at_least_float32(a.dtype, b.dtype),
    )


def is_float(dtype: Any) -> bool:
    """Whether gradients flow through values of a dtype."""
    return jnp.issubdtype(dtype, jnp.floating)


def widen(x: Any) -> jax.Array:
    """Casts floats to float32, unless they are at least as wide."""
    x = jnp.asarray(x)
    return x.astype(at_least_float32(x.dtype)) if is_float(x.dtype) else x


def apart(x: jax.Array) -> jax.Array:
    """Stops XLA from merging the transposition of an array into a product."""
    return jax.lax.optimization_barrier(x)


@jax.jit  # a program has one copy for all arrays of one shape
def row_sums(x: jax.Array) -> jax.Array:
    """Sums groups of about sqrt(n) entries of an array; returns the P sums, (P,)."""
    columns = _num_columns(x.size)
    return jnp.sum(jnp.pad(x.ravel(), (0, -x.size % columns)).reshape(-1, columns), 1)


def joined(parts: Sequence[jax.Array]) -> jax.Array:
    """Joins the parts along the last axis, in the widest dtype."""
    dtype = at_least_float32(*(x.dtype for x in parts))
    return jnp.concatenate([x.astype(dtype) for x in parts], axis=-1)


@functools.partial(jax.jit, static_argnames="axis")
def add_up(parts: jax.Array, axis: int = -1) -> jax.Array:
    """Sums over an axis, by a tree of elementwise additions."""
    while (size := parts.shape[axis]) > 1:
        half = size // 2
        first, second, *rest = jnp.split(parts, [*range(half, size, half)], axis)
        parts = (
            jnp.concatenate([first + second, *rest], axis) if rest else first + second
        )
    return parts.sum(axis) if size == 0 else parts.squeeze(axis)


def num_roundings(size: int) -> int:
    """The number of roundings on any path from one of `size` entries to their sum."""
    columns = _num_columns(size)
    return columns + depth(math.ceil(size / columns))


def depth(num_parts: int) -> int:
    """The depth of the tree that adds up the parts."""
    return math.ceil(math.log2(max(num_parts, 1)))


def _num_columns(size: int) -> int:
    return 2 ** math.ceil(math.log2(max(size, 1)) / 2)
