"""Privatizers: optax transformations that add calibrated noise to a clipped sum.

Everything that goes in is sensitive, everything that comes out is released, and
whatever optax does afterwards is post-processing.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpmp import _meshes, _random, _validate
from dpmp._fence import behind_a_branch
from dpmp._typing import PyTree
from dpmp.noise_addition import _grid_noise
from dpmp.numerics._double_words import two_sum
from dpmp.numerics._stored import at_least_float32
from dpmp.numerics._sums import Sum, as_sum, is_sum, num_entries

# What is assumed of a float sum whose sensitivity is not given.
_LARGEST_NOISE_MULTIPLIER = 32.0

# Float sums are put on a grid so fine that this costs 1/4096 of the noise, as long as
# the standard deviation has between 2^14 and 2^21 units: the sampler has none that are
# much wider, and sums must fit into 32 bits.
_LOG_SNAP_SHARE = 12
_LOG_UNITS = (14, 20)


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
    l2_sensitivity: float | None = None,
) -> optax.GradientTransformation:
    """Adds independent Gaussian noise to every entry of a sum of clipped gradients.

    >>> privatizer = gaussian_privatizer(stddev=1.0, prng_key=jax.random.key(0))
    >>> sum_of_clipped_grads = {"w": jnp.zeros(3, jnp.bfloat16)}
    >>> noise_state = privatizer.init(sum_of_clipped_grads)
    >>> noisy_grads, noise_state = privatizer.update(sum_of_clipped_grads, noise_state)
    >>> print(noisy_grads["w"].dtype, noise_state.step)
    float32 1

    Guarantees:
      - The output is post-processing of the Gaussian mechanism with this standard
        deviation, for the bits that come out, but for a total variation distance below
        2^-109 in each entry: integers get discrete Gaussian noise, on a grid that both
        are on, and become float32 after that.
      - The noise is a function of (root key, step, place of the entry in the tree): a
        step that is run again repeats its release bit for bit, and no two steps share
        noise. It does not depend on the sharding of the sum under `jax.jit`; within
        `jax.shard_map`, every device must have the whole sum, or shards would have the
        same noise.
      - Without `prng_key`, each `init` draws a key of 128 bits from the system.

      A `GridArray` (an exact sum) brings its grid along. Other sums are first rounded
      to multiples of a power of two. That can move two of them apart by the root of the
      number of entries, in units of that grid, and the noise is wider by as much: at a
      noise multiplier of 1, by 1/4096 up to 65,000 entries, and by 1/1000 for a
      million. Entries of more than 960 standard deviations are cut off.

    Args:
      stddev: standard deviation of the noise, in the unit of the sum: the noise
        multiplier times the sensitivity *of the function whose output goes in* (if
        that divides by `normalize_by`, so does its `.sensitivity()`). The noise is
        never narrower. On the grid of an exact sum it may be wider: by less than 4 %
        if `stddev` has at least 3000 units, by less than 0.25 % from 33,000 on.
      prng_key: a jax key, for one privatizer of one run, which sees the whole sum;
        None for 128 bits from the system. Two runs with one key have the same noise,
        and their difference has none, be it that they differ in data, in clip norm, in
        learning rate or in anything else. The same goes for `jax.vmap` over sums, and
        for two privatizers with one key in one optimizer.
      l2_sensitivity: that of the sum. Rounding a float sum costs the more, the larger
        `stddev` is in comparison; without this, up to 32 times is assumed. Exact sums
        do not need it.

    Returns:
      An `optax.GradientTransformation` with state `NoiseState` and float32 output.

    Raises:
      ValueError: for a negative or infinite `stddev`, an `l2_sensitivity` that is not
        positive, a `prng_key` that is no jax key, leaves that are not float arrays,
        `init` under `jax.jit` without a key, noise of more than four million units of
        the grid, and for float sums a `stddev` that is not from 1e-24 to 1e30.

    References:
      [Canonne, Kamath, Steinke: The discrete Gaussian for differential
      privacy](https://arxiv.org/abs/2004.00010)
    """
    if l2_sensitivity is not None:
        l2_sensitivity = _validate.positive(
            l2_sensitivity=l2_sensitivity, fix="Use clipped_grad(...).sensitivity()."
        )
    stddev = _check_stddev(stddev)

    def add_noise(sums: list[Sum], noise_state: NoiseState) -> list[jax.Array]:
        noise_multiplier = _LARGEST_NOISE_MULTIPLIER
        if l2_sensitivity is not None:
            noise_multiplier = stddev / l2_sensitivity
        unit, widened = 1.0, Fraction(stddev)
        if not all(x.is_on_grid for x in sums):  # what moves some concerns all of them
            snap_cost = noise_multiplier * math.sqrt(num_entries(sums))
            unit, widened = _snapping(stddev, snap_cost)
        on_grids = [x.snapped(unit) for x in sums]
        key_words = _random.key_words(noise_state.prng_key)
        return _grid_noise.add_noise(on_grids, widened, key_words, noise_state.step)

    return _privatizer(add_noise, stddev, prng_key)


def continuous_gaussian_privatizer(
    *,
    stddev: float,
    prng_key: jax.Array | None = None,
    dtype: Any = None,
) -> optax.GradientTransformation:
    """Adds floating-point noise: for comparison, not for sensitive data.

    Noise is drawn and added in float32 or wider, and the two words of a `DoubleWord`
    and a float64 sum meet it before anything is rounded. Still, the guarantee of the
    Gaussian mechanism is one about real numbers. A float32 sum of 0 and one of 1 leave
    different lowest bits in the output, which tell them apart nine times out of ten,
    and noise in float32 ends at 5.42 standard deviations (Mironov 2012;
    `python -m dpmp selfcheck` shows it).

    Args:
      stddev: as in `gaussian_privatizer`.
      prng_key: as in `gaussian_privatizer`.
      dtype: of the noise, float32 or float64; None for the dtype of each leaf, or
        float32 where that is narrower.

    Returns:
      An `optax.GradientTransformation` with state `NoiseState`; its output is float32
      or wider.

    Raises:
      ValueError: as `gaussian_privatizer`, for a dtype narrower than float32, and for
        float64 without 64-bit mode.

    References:
      [Mironov: On significance of the least significant bits for differential
      privacy](https://doi.org/10.1145/2382196.2382264)
    """
    stddev, noise_dtype = _check_stddev(stddev), _check_noise_dtype(dtype)

    def add_noise(sums: list[Sum], noise_state: NoiseState) -> list[jax.Array]:
        step_key = _random.fold_in(noise_state.prng_key, noise_state.step)

        def add_all() -> list[jax.Array]:
            keys = [_random.fold_in(step_key, i) for i in range(len(sums))]
            return [
                _add_float_noise(x, key, stddev, noise_dtype)
                for x, key in zip(sums, keys, strict=True)
            ]

        return behind_a_branch(add_all, (noise_state.step, sums))

    return _privatizer(add_noise, stddev, prng_key)


def _privatizer(
    add_noise: Callable[[list[Sum], NoiseState], list[jax.Array]],
    stddev: float,
    prng_key: jax.Array | None,
) -> optax.GradientTransformation:
    """The optax transformation that applies `add_noise` to the leaves of a sum."""
    if prng_key is not None:
        _random.check_key(prng_key)

    def init(params: PyTree) -> NoiseState:
        del params
        key = _random.fresh_key() if prng_key is None else prng_key
        return NoiseState(key, jnp.zeros((), jnp.int32))

    def update(
        sum_of_clipped_grads: PyTree, noise_state: NoiseState, params: PyTree = None
    ) -> tuple[PyTree, NoiseState]:
        del params
        leaves, treedef = jax.tree.flatten(sum_of_clipped_grads, is_leaf=is_sum)
        sums = [as_sum(leaf) for leaf in leaves]
        for i, x in enumerate(sums):
            x.check_before_noise(i)
        noisy = add_noise(sums, noise_state) if stddev else [x.to_float() for x in sums]
        new_state = NoiseState(noise_state.prng_key, noise_state.step + 1)
        return jax.tree.unflatten(treedef, noisy), new_state

    update = _meshes.on_automatic_axes(update, _specs_of_noisy)
    # The arguments have jax_privacy's names, where optax has its own.
    return optax.GradientTransformation(init, cast("optax.TransformUpdateFn", update))


def _specs_of_noisy(specs: Any, output: Any) -> list[jax.P]:
    """Noisy sums are sharded as the sums are, and the state is on all devices."""
    sums = jax.tree.leaves(specs[0], is_leaf=is_sum)
    of_noisy = [jax.tree.leaves(x)[0] for x in sums]
    return [*of_noisy, *(jax.P() for _ in jax.tree.leaves(output[1]))]


def _snapping(stddev: float, snap_cost: float) -> tuple[float, Fraction]:
    """The unit that float sums are rounded to, and the standard deviation it takes.

    Args:
      stddev: of the noise to be added.
      snap_cost: what rounding adds to it, in units.
    """
    _validate.require(
        1e-24 <= stddev <= 1e30,
        "the noise of a float sum must have a stddev from 1e-24 to 1e30",
        stddev=stddev,
        fix="Rescale the loss: float32 cannot handle other sizes.",
    )
    lowest, highest = _LOG_UNITS
    finest = math.ceil(math.log2(max(snap_cost, 1.0))) + _LOG_SNAP_SHARE
    log_units = min(max(finest, lowest), highest)
    unit = 2.0 ** (math.frexp(stddev)[1] - 1 - log_units)
    width = Fraction(stddev) / Fraction(unit) + Fraction(snap_cost * (1 + 2.0**-20))
    return unit, width * Fraction(unit)


def _add_float_noise(x: Sum, key: jax.Array, stddev: float, dtype: Any) -> jax.Array:
    hi, lo = x.words()
    sum_dtype = at_least_float32(hi.dtype)
    noise_dtype = jnp.dtype(dtype or sum_dtype)
    out_dtype = at_least_float32(sum_dtype, noise_dtype)
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


def _check_stddev(stddev: float) -> float:
    return _validate.nonnegative(
        stddev=stddev, fix="Use noise_multiplier * clipped_grad(...).sensitivity()."
    )


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
