"""Privatizers: optax transformations that add calibrated noise to a clipped sum.

Everything that goes in is sensitive, everything that comes out is released, and
whatever optax does afterwards is post-processing.
"""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpmp import _random, _validate
from dpmp._accumulation import DoubleWord, two_sum
from dpmp._stored import at_least_float32
from dpmp._typing import PyTree


class NoiseState(NamedTuple):
    """What the noise of the next step is a function of.

    Attributes:
      prng_key: the root key; whoever knows it can take the noise off.
      step: int32 counter of the releases made.
    """

    prng_key: jax.Array
    step: jax.Array


def gaussian_privatizer(
    *,
    stddev: float,
    prng_key: jax.Array | None = None,
    dtype: Any = None,
) -> optax.GradientTransformation:
    """Adds independent Gaussian noise to every entry of a sum of clipped gradients.

    >>> privatizer = gaussian_privatizer(stddev=1.0, prng_key=jax.random.key(0))
    >>> sum_of_clipped_grads = {"w": jnp.zeros(3, jnp.bfloat16)}
    >>> noise_state = privatizer.init(sum_of_clipped_grads)
    >>> noisy_grads, noise_state = privatizer.update(sum_of_clipped_grads, noise_state)
    >>> print(noisy_grads["w"].dtype, noise_state.step)
    float32 1

    Guarantees:
      - Noise is drawn and added in float32 or wider, and the output is float32 or
        wider, whatever the dtype of the input. The two words of a `DoubleWord` and a
        float64 sum meet the noise before anything is rounded to float32.
      - The noise is a function of (root key, step, position of the leaf): a step that
        is run again repeats its release bit for bit, and no two steps share noise.
      - Without `prng_key`, each `init` draws a key of 128 bits from the system.

      The guarantee of the Gaussian mechanism is one about real numbers. Noise in
      floating point approximates it and is not proof against an adversary who
      inspects the lowest bits of the output (Mironov 2012), nor does it reach beyond
      5.42 standard deviations in float32.

    Args:
      stddev: standard deviation of the noise, in the unit of the sum: the noise
        multiplier times the sensitivity *of the function whose output goes in* (if
        that divides by `normalize_by`, so does its `.sensitivity()`).
      prng_key: a jax key, for one run; None for 128 bits from the system. Two runs
        with one key have the same noise, and their difference has none, be it that
        they differ in data, in clip norm, in learning rate or in anything else. The
        same goes for `jax.vmap` over sums.
      dtype: of the noise, float32 or float64; None for the dtype of each leaf, or
        float32 where that is narrower.

    Returns:
      An `optax.GradientTransformation` with state `NoiseState`.

    Raises:
      ValueError: for a negative or infinite `stddev`, a `prng_key` that is no jax key,
        a dtype narrower than float32, float64 without 64-bit mode, leaves that are
        not float arrays, and `init` under `jax.jit` without a key.

    References:
      [Mironov: On significance of the least significant bits for differential
      privacy](https://doi.org/10.1145/2382196.2382264)
    """
    _validate.nonnegative(
        stddev=stddev, fix="Use noise_multiplier * clipped_grad(...).sensitivity()."
    )
    if prng_key is not None:
        _random.check_key(prng_key)
    noise_dtype = _check_noise_dtype(dtype)

    def init(params: PyTree) -> NoiseState:
        del params
        key = _random.fresh_key() if prng_key is None else prng_key
        return NoiseState(key, jnp.zeros((), jnp.int32))

    def update(
        sum_of_clipped_grads: PyTree, noise_state: NoiseState, params: PyTree = None
    ) -> tuple[PyTree, NoiseState]:
        del params
        leaves, treedef = jax.tree.flatten(sum_of_clipped_grads, is_leaf=_is_wide)
        _check_leaves(leaves)
        step_key = jax.random.fold_in(noise_state.prng_key, noise_state.step)
        noisy = [
            _add_noise(leaf, jax.random.fold_in(step_key, i), stddev, noise_dtype)
            for i, leaf in enumerate(leaves)
        ]
        new_state = NoiseState(noise_state.prng_key, noise_state.step + 1)
        return jax.tree.unflatten(treedef, noisy), new_state

    # The arguments have jax_privacy's names, where optax has its own.
    return optax.GradientTransformation(init, cast("optax.TransformUpdateFn", update))


def _add_noise(leaf: Any, key: jax.Array, stddev: float, dtype: Any) -> jax.Array:
    hi, lo = leaf if _is_wide(leaf) else (jnp.asarray(leaf), None)
    sum_dtype = at_least_float32(hi.dtype)
    noise_dtype = jnp.dtype(dtype or sum_dtype)
    out_dtype = at_least_float32(sum_dtype, noise_dtype)
    if stddev == 0:
        noise = jnp.zeros(hi.shape, out_dtype)
    else:
        noise = jax.random.normal(key, hi.shape, noise_dtype)
        noise = (noise * _round_up(stddev, noise_dtype)).astype(out_dtype)
    hi = hi.astype(out_dtype)
    if lo is None:
        return hi + noise
    rounded, error = two_sum(hi, noise)
    return rounded + (error + lo.astype(out_dtype))


def _round_up(x: float, dtype: Any) -> jax.Array:
    """`x` in a dtype, not below its value: no less noise than was calibrated for."""
    rounded = np.asarray(x, dtype)
    if float(rounded) < x:
        rounded = np.nextafter(rounded, np.asarray(np.inf, dtype))
    return jnp.asarray(rounded)


def _is_wide(x: Any) -> bool:
    return isinstance(x, DoubleWord)


def _check_noise_dtype(dtype: Any) -> Any:
    if dtype is None:
        return None
    name = np.dtype(dtype).name
    _validate.require(
        name in ("float32", "float64"),
        "the dtype of the noise must be float32 or float64",
        dtype=name,
        fix="Leave it out: half-precision normals take a few hundred distinct values "
        "and are not Gaussian.",
    )
    _validate.check_x64(np.dtype(dtype), "float64 noise")
    return np.dtype(dtype)


def _check_leaves(leaves: list[Any]) -> None:
    for i, leaf in enumerate(leaves):
        dtype = jnp.result_type(leaf.hi if _is_wide(leaf) else leaf)
        _validate.require(
            jnp.issubdtype(dtype, jnp.floating),
            "every leaf of sum_of_clipped_grads must be a real float array",
            leaf=i,
            dtype=dtype.name,
            fix="Add noise to the output of clipped_grad, before anything else.",
        )
