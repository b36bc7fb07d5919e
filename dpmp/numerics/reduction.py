"""Sums with few roundings on any path, in programs that stay small.

A compiler adds up the summands of a reduction in an order of its choice. It keeps the
order of additions that are written out, but these take hundreds of lines of a program
for each array. So only short blocks of summands are written out, once for all arrays of
one shape:

- `sum_entries` sums over the entries of arrays. It cuts the sums of blocks into blocks
  again, until few are left. The remaining columns of all arrays are added up together.
- `sum_examples` sums over the examples of a batch. One loop of a few iterations, or
  several nested loops, add up the blocks of all arrays at once.

`squared_norm` sums the squares of entries, and counts the roundings.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from dpmp._fence import StoredArray, fence, floats_of
from dpmp._typing import PyTree

# Of float32; below `SMALLEST_NORMAL`, a number may be flushed to zero.
UNIT_ROUNDOFF, SMALLEST_NORMAL = 2.0**-24, 2.0**-126

# An elementwise addition.
Add: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]
# A function of a start, which may be traced, and a number of columns: (B, size).
Columns: TypeAlias = Callable[[Any, int], jax.Array]
# A function of columns, the position of the first, and more operands: summands, (B, n).
# It is hashable, so that it is traced once.
EntryTerm: TypeAlias = Callable[..., jax.Array]

# The number of summands in a block.
_BLOCK = 8

# For arrays with more entries, a loop adds up this many blocks. It takes less memory
# and a little more time.
_LARGE, _BLOCKS_OF_LARGE = 2**16, 8

# Arrays of at most this many entries are joined before their columns are added up.
_FEW_ENTRIES = 512

# The number of iterations of all loops but the outermost.
_ITERATIONS = 4


def pairwise(terms: Sequence[PyTree], add: Callable[[PyTree, PyTree], PyTree]) -> Any:
    """Adds up at least one summand, as a balanced tree of additions."""
    terms = list(terms)
    while len(terms) > 1:
        pairs = [add(a, b) for a, b in zip(terms[::2], terms[1::2], strict=False)]
        terms = pairs + terms[2 * len(pairs) :]
    return terms[0]


def sum_entries(
    stack: Sequence[StoredArray], term: EntryTerm, add: Add, *operands: jax.Array
) -> tuple[jax.Array, int]:
    """Sums a function of the entries of at least one array, (B, n), for each example.

    The function maps zeros to zeros, and zero is the neutral element of the addition.
    Returns the sums, (B,), and the largest number of additions on any path.
    """
    parts = []
    for x in stack:
        parts += _sum_until_few(x.bits, *operands, dtype=x.dtype, term=term, add=add)
    dtype = max((part.dtype for part in parts), key=lambda dtype: dtype.itemsize)
    total = fence(jnp.concatenate([part.astype(dtype) for part in parts], axis=1))
    if total.shape[1] == 0:
        return jnp.zeros(total.shape[:1], dtype), 0
    until_few = max(
        _depth(x.bits.shape[1], _FEW_ENTRIES, with_rest=False) for x in stack
    )
    depth = until_few + _depth(total.shape[1], 1, with_rest=True)
    return _sum_columns(total, add), depth


class SquaredNorm(NamedTuple):
    """Per-example squared norms of one clipping group, with their rounding error."""

    value: jax.Array  # the computed sums of squares, (B,), float32 or wider
    # On any path from an entry to `value`, at most: one for its square, unless the
    # square is exact, and one for each addition.
    roundings: int
    num_entries: int  # the number of squares in each sum
    # An upper bound on the squared norm of the contribution for a coefficient of 1,
    # (B,), or None. Clipping uses it in place of `value`.
    bound: jax.Array | None = None

    @property
    def underflow(self) -> float:
        """An upper bound on the sum of squares that were flushed to zero."""
        return max(self.num_entries, 1) * SMALLEST_NORMAL


def squared_norm(stack: list[StoredArray]) -> SquaredNorm:
    """Computes per-example squared norms over at least one array."""
    value, depth = sum_entries(stack, _square, jnp.add)
    # Squares of 16-bit floats are exact in float32, unless they are flushed to zero.
    rounded_square = any(x.dtype.itemsize > 2 for x in stack)
    return SquaredNorm(
        value, depth + rounded_square, sum(x.bits.shape[1] for x in stack)
    )


def _square(rows: jax.Array, start: Any, *operands: jax.Array) -> jax.Array:
    del start, operands
    return jnp.square(rows)


@functools.partial(jax.jit, static_argnames="add")
def _sum_columns(total: jax.Array, add: Add) -> jax.Array:
    """Sums all columns: (B,)."""
    while (size := total.shape[1]) > 1:
        rest, total = _sum_blocks(functools.partial(_columns_of, total), size, add)
        total = jnp.concatenate([*rest, total], axis=1) if rest else total
    return total[:, 0]


# A jitted function: the program has one copy for all arrays of one shape.
@functools.partial(jax.jit, static_argnames=("dtype", "term", "add"))
def _sum_until_few(
    bits: jax.Array, *operands: jax.Array, dtype: Any, term: EntryTerm, add: Add
) -> list[jax.Array]:
    """Adds up summands until few columns are left: (B, k) arrays."""

    @jax.jit  # one copy for all slices of one width
    def terms(bits: jax.Array, start: Any, *operands: jax.Array) -> jax.Array:
        return term(floats_of(bits, dtype), start, *operands)

    def take_terms(start: Any, size: int) -> jax.Array:
        return terms(_columns_of(bits, start, size), jnp.int32(start), *operands)

    take: Columns = take_terms
    parts, size = [], bits.shape[1]
    while size > _FEW_ENTRIES:
        rest, total = _sum_blocks(take, size, add)
        parts += rest
        take, size = functools.partial(_columns_of, total), total.shape[1]
    return [*parts, take(0, size)]


def _sum_blocks(
    take: Columns, size: int, add: Add
) -> tuple[list[jax.Array], jax.Array]:
    """Returns the columns that fill no block, and the sums of blocks."""
    block, num_blocks = _block_and_number(size)
    if num_blocks == 1:  # the last columns of a block may be padding
        width = -(-size // block)
        return [], fence(pairwise([take(j * width, width) for j in range(block)], add))
    width = size // (block * num_blocks)
    whole = block * num_blocks * width

    def sum_block(i: Any) -> jax.Array:
        # The columns of a block are far apart, so whole rows are added up.
        return pairwise(
            [take((i * block + j) * width, width) for j in range(block)], add
        )

    rest = [take(whole, size - whole)] if whole < size else []
    shape = jax.eval_shape(sum_block, np.int32(0))
    zeros = jnp.zeros(shape.shape, shape.dtype)
    total = jax.lax.fori_loop(
        0, num_blocks, lambda i, total: add(total, sum_block(i)), zeros
    )
    return rest, fence(total)


def _columns_of(x: jax.Array, start: Any, size: int) -> jax.Array:
    """Returns columns; beyond the last one, where no traced `start` goes, zeros."""
    if size == x.shape[1]:
        return x
    if isinstance(start, int):
        stop = min(start + size, x.shape[1])
        columns = jax.lax.slice_in_dim(x, min(start, stop), stop, axis=1)
        missing = size - columns.shape[1]
        return jnp.pad(columns, [(0, 0), (0, missing)]) if missing else columns
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)


def _block_and_number(size: int) -> tuple[int, int]:
    """The number of columns in a block, and the number of blocks that a loop adds."""
    return min(size, _BLOCK), _BLOCKS_OF_LARGE if size > _LARGE else 1


def _depth(size: int, until: int, *, with_rest: bool) -> int:
    """The additions on a path until few columns are left, with or without the rest."""
    depth = 0
    while size > until:
        block, num_blocks = _block_and_number(size)
        depth += _log2_ceil(block) + num_blocks - 1
        whole, rest = divmod(size, block * num_blocks)
        size = whole + (rest if with_rest else 0)
        if num_blocks == 1:  # padded
            size = whole + (rest > 0)
    return depth


def _log2_ceil(n: int) -> int:
    return (n - 1).bit_length()


def sum_examples(
    take: Callable[[Any], list[PyTree]],
    num_blocks: int,
    *,
    add: Callable[[PyTree, PyTree], PyTree] = operator.add,
) -> list[PyTree]:
    """Adds up `take(0)`, `take(1)`, ...: the sums of a block for every array."""
    if num_blocks == 1:
        return take(0)
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(take, jnp.int32(0))
    )
    loops = _loops(num_blocks)
    spans = [math.prod(loops[:i]) for i in range(len(loops))]

    def add_all(a: list[PyTree], b: list[PyTree]) -> list[PyTree]:
        return [add(x, y) for x, y in zip(a, b, strict=True)]

    def run(level: int, start: Any) -> list[PyTree]:
        if level < 0:
            return take(start)
        span = spans[level]

        def body(i: jax.Array, total: list[PyTree]) -> list[PyTree]:
            return add_all(total, run(level - 1, start + span * i))

        left = num_blocks - start  # the last inner loops may not be full
        count = jnp.minimum(loops[level], (left + span - 1) // span)
        is_full = num_blocks == math.prod(loops) or level == len(loops) - 1
        return jax.lax.fori_loop(0, loops[level] if is_full else count, body, zeros)

    return run(len(loops) - 1, 0)


def indices_of_block(block: Any, num_blocks: int, size: int) -> list[jax.Array]:
    """Returns the number of a block of examples, once for each of its rows: uint32."""
    # The compiler does not know the indices to be equal. XLA turns a block with many
    # readers into a function that loads its index for every entry, and then vectorises
    # no loop over entries.
    block = jnp.asarray(block).astype(jnp.uint32)
    return [jnp.minimum(block, np.uint32(num_blocks - 1 + j)) for j in range(size)]


def rows_of_block(x: jax.Array, indices: list[jax.Array]) -> list[jax.Array]:
    """Returns the rows of a block of examples, by its `indices_of_block`."""
    # The rows of a block are far apart. So no block lies on one device alone if the
    # array is sharded by examples.
    size, rest = len(indices), x.shape[1:]
    num_blocks = x.shape[0] // size
    blocks = x.reshape(size, num_blocks, *rest)
    starts = [np.uint32(0)] * len(rest)
    return [
        jax.lax.dynamic_slice(blocks, (np.uint32(0), index, *starts), (size, 1, *rest))[
            j, 0
        ]
        for j, index in enumerate(indices)
    ]


def block_size(num_examples: int) -> int:
    """The number of examples in a block: a divisor, so that blocks are views."""
    sizes = range(1, _BLOCK + 1)
    return max(size for size in sizes if num_examples % size == 0)


def _loops(num_blocks: int) -> list[int]:
    """The iterations of nested loops, innermost first; all but the last are full."""
    loops = []
    while num_blocks > _BLOCK:
        loops.append(_ITERATIONS)
        num_blocks = -(-num_blocks // _ITERATIONS)
    return [*loops, num_blocks]


def depth(num_examples: int) -> int:
    """The largest number of rounded additions on any path of a sum of examples."""
    size, loops = _sizes(num_examples)
    return _log2_ceil(size) + sum(count - 1 for count in loops)


def summed_norms(num_examples: int) -> float:
    """Adds up the norms of the results of all rounding additions, for norms of 1."""
    # A loop over k summands has partial sums of 2, 3, ... and k summands. Its first
    # addition is to zero, and exact. Loops that are not full count as full.
    size, loops = _sizes(num_examples)
    each = _log2_ceil(size) + sum((k + 1) / 2 - 1 / k for k in loops)
    return size * math.prod(loops) * each


def _sizes(num_examples: int) -> tuple[int, list[int]]:
    """The size of a block, and the iterations of the loops over blocks."""
    size = block_size(num_examples)
    return size, _loops(num_examples // size)


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of a number that is at most `limit`, or 1."""
    return max(
        (k for k in range(1, min(limit, number) + 1) if number % k == 0), default=1
    )
