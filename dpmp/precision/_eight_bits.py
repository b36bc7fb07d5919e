"""Averages of an optimizer in 8 bits: a quarter of their memory.

An average is divided into blocks of 128 numbers along its last axis; if that axis is
shorter, in the order of memory. A block has the size s of its largest number, in
float32. Each of its numbers is stored as an integer c from -127 to 127, and stands for

    sign(c) (c / 127)^2 s.

The squares make steps finer for small numbers: the smallest one but zero is s / 16129.
A number between two of these is rounded to either at random, so that its mean stays:
rounded to nearest, an average that moves by a thousandth in a step would not move at
all. Only zero becomes zero. So Adam never divides by a second moment that was lost, and
where the moment is much smaller than others of its block, it is too large, and steps
are shorter.

References:
  Dettmers et al.: 8-bit optimizers via block-wise quantization, 2022.
"""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.programs import formats

_BLOCK, _LARGEST = 128, 127

# The averages of optax's optimizers. Other arrays of a state may be parameters, whose
# small changes 8 bits would lose.
_AVERAGES = "mu", "nu", "trace"

# Smaller arrays stay as they are: they take little memory, and compile.
_FEWEST_ENTRIES = 4096


class EightBits(NamedTuple):
    """An array in 8 bits: int8 of its shape, and for each block its largest size."""

    codes: jax.Array
    sizes: jax.Array


class EightBitState(NamedTuple):
    """The state of an optimizer, with averages as `EightBits`, and the steps so far."""

    inner: PyTree
    step: jax.Array


def in_8_bits(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Keeps the averages of an optimizer in 8 bits between steps.

    With Adam, this saves 6 of the 12 bytes that a parameter takes between steps. It
    costs no privacy, because the averages are computed after the noise.

    >>> optimizer = in_8_bits(optax.adam(1e-3))
    >>> state = optimizer.init(jnp.zeros((64, 64)))
    >>> print(sum(x.nbytes for x in jax.tree.leaves(state)))
    8456

    Args:
      optimizer: an optimizer of optax. Those of its averages that have 4096 entries or
        more are stored in 8 bits: the arrays that optax calls `mu`, `nu` and `trace`.
        All other arrays of its state stay as they are.

    Returns:
      An optimizer with another state. Its updates differ by the rounding of averages,
      which is random, and the same in every run.

    Raises:
      ValueError: if `optimizer` is not a transformation of optax, or (by `init`) keeps
        no such average.

    References:
      [Dettmers et al.: 8-bit optimizers via block-wise
      quantization](https://arxiv.org/abs/2110.02861)
    """
    _validate.instance(
        optax.GradientTransformation,
        "Use optax.adam(1e-3), for example.",
        optimizer=optimizer,
    )
    inner = optax.with_extra_args_support(optimizer)

    def init(params: PyTree) -> EightBitState:
        state, step = inner.init(params), jnp.zeros((), jnp.int32)
        names = {_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)}
        _validate.require(
            not names.isdisjoint(_AVERAGES),
            "the optimizer must keep averages. Use it without in_8_bits, or use "
            "optax.adam or momentum.",
            arrays=sorted(x for x in names if x),
        )
        return EightBitState(_rounded(state, step), step)

    def update(
        updates: PyTree, state: EightBitState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, EightBitState]:
        wide = jax.tree.map(
            lambda x: _widened(x) if isinstance(x, EightBits) else x,
            state.inner,
            is_leaf=lambda x: isinstance(x, EightBits),
        )
        updates, new = inner.update(updates, wide, params, **extra)
        return updates, EightBitState(_rounded(new, state.step), state.step + 1)

    # The cast is for the type checker, to which any state is an OptState.
    return optax.GradientTransformationExtraArgs(init, cast("Any", update))


def _name(path: Any) -> str:
    """The name of the average that an array of a state belongs to, or ""."""
    names = [getattr(key, "name", "") for key in path]
    return next((x for x in names if x in _AVERAGES), names[-1] if names else "")


def _rounded(state: PyTree, step: jax.Array) -> PyTree:
    """Stores the averages of a state in 8 bits."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
    # Anyone may know these random bits, because the averages have been released.
    key = jax.random.fold_in(jax.random.key(0), step)
    return treedef.unflatten(
        _to_eight_bits(x, jax.random.fold_in(key, i))
        if _name(path) in _AVERAGES and _is_large(x)
        else x
        for i, (path, x) in enumerate(leaves)
    )


def _is_large(x: Any) -> bool:
    is_float = jnp.issubdtype(jnp.result_type(x), jnp.floating)
    return is_float and jnp.size(x) >= _FEWEST_ENTRIES


def _to_eight_bits(x: jax.Array, key: jax.Array) -> EightBits:
    rows = _in_rows(x.astype(jnp.float32))
    sizes = formats.largest_of_blocks(rows, _BLOCK)
    inverse = formats.spread(jnp.where(sizes > 0, 1 / sizes, 0.0), rows, _BLOCK)
    shares = jnp.minimum(jnp.abs(rows) * inverse, 1.0)
    # c is the largest number with (c / 127)^2 <= share, up to rounding.
    below = jnp.floor(jnp.sqrt(shares) * _LARGEST)
    low, high = jnp.square(below / _LARGEST), jnp.square((below + 1) / _LARGEST)
    chance = (shares - low) / (high - low)
    random = jax.random.bits(key, rows.shape, jnp.uint8).astype(jnp.float32) / 256
    codes = jnp.where(random < chance, below + 1, below)
    codes = jnp.clip(codes, jnp.where(shares > 0, 1, 0), _LARGEST)
    codes = (jnp.sign(rows) * codes).astype(jnp.int8)
    return EightBits(codes.reshape(x.shape), sizes)


def _widened(x: EightBits) -> jax.Array:
    rows = _in_rows(x.codes.astype(jnp.float32)) / _LARGEST
    wide = rows * jnp.abs(rows) * formats.spread(x.sizes, rows, _BLOCK)
    return wide.reshape(x.codes.shape)


def _in_rows(x: jax.Array) -> jax.Array:
    """Makes one row of an array whose last axis is shorter than a block."""
    return x if x.shape[-1] >= _BLOCK else x.reshape(-1)
