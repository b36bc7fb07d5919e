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

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from dpmp import _meshes, _validate
from dpmp._typing import PyTree
from dpmp._warnings import warn
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
        no `mu`, `nu` or `trace` of any size.

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
        names: list[str] = []
        step = jnp.zeros((), jnp.int32)
        rounded = functools.partial(_rounded, step=step, found=names)
        state = _meshes.on_automatic_axes(rounded, _specs)(inner.init(params))
        if set(names).isdisjoint(_AVERAGES):
            _validate.fail(
                "the optimizer must keep averages. Use it without in_8_bits, or use "
                "optax.adam or momentum.",
                fields=sorted({x for x in names if x}),
            )
        if not any(map(_is_narrow, jax.tree.leaves(state, is_leaf=_is_narrow))):
            warn(
                f"in_8_bits changes nothing: no average has {_FEWEST_ENTRIES} entries "
                "or more. Use the optimizer without it."
            )
        return EightBitState(state, step)

    def update(
        updates: PyTree, state: EightBitState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, EightBitState]:
        wide = jax.tree.map(
            lambda x: _widened(x) if _is_narrow(x) else x,
            state.inner,
            is_leaf=_is_narrow,
        )
        updates, new = inner.update(updates, wide, params, **extra)
        return updates, EightBitState(_rounded(new, state.step, []), state.step + 1)

    # The cast is for the type checker, to which any state is an OptState.
    return optax.GradientTransformationExtraArgs(init, cast("Any", update))


def _map_averages(
    function: Callable[[PyTree], PyTree], state: PyTree, found: list[str]
) -> PyTree:
    """Applies a function to the averages of a state; notes the names of all fields.

    States of optax are named tuples, in tuples and dictionaries. Trees of parameters
    have fields of their own.
    """
    if isinstance(state, dict):
        return {k: _map_averages(function, x, found) for k, x in state.items()}
    if not isinstance(state, tuple | list) or isinstance(state, EightBits):
        return state
    names = getattr(state, "_fields", [""] * len(state))
    found.extend(names)
    parts = [
        function(x) if name in _AVERAGES else _map_averages(function, x, found)
        for name, x in zip(names, state, strict=True)
    ]
    return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)


def _rounded(state: PyTree, step: jax.Array, found: list[str]) -> PyTree:
    """Stores the averages of a state in 8 bits."""
    # Anyone may know these random bits, because the averages have been released.
    key = jax.random.fold_in(jax.random.key(0), step)
    numbers = itertools.count()

    def rounded(x: jax.Array) -> jax.Array | EightBits:
        own_key = jax.random.fold_in(key, next(numbers))
        return _to_eight_bits(x, own_key) if _is_large(x) else x

    return _map_averages(lambda tree: jax.tree.map(rounded, tree), state, found)


def _specs(specs: Any, output: Any) -> list[jax.P]:
    """Partition specs: codes are sharded like the averages, and sizes are too."""
    found: list[jax.P] = []
    arrays = jax.tree.leaves(output, is_leaf=_is_narrow)
    given = jax.tree.leaves(specs[0], is_leaf=lambda x: isinstance(x, jax.P))
    for array, spec in zip(arrays, given, strict=True):
        found.append(spec)
        if _is_narrow(array):
            has_rows = array.sizes.ndim == array.codes.ndim
            found.append(jax.P(*spec[: array.codes.ndim - 1]) if has_rows else jax.P())
    return found


def _is_narrow(x: Any) -> bool:
    return isinstance(x, EightBits)


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
    bits = jax.random.bits(key, rows.shape, jnp.uint16)
    random = (bits.astype(jnp.float32) + 0.5) / 2**16
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
