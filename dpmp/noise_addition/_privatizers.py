"""The privatizer, which adds Gaussian noise to a sum in integers."""

import functools
import math
from fractions import Fraction
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from dpmp import _meshes, _random, _validate
from dpmp._typing import PyTree
from dpmp.noise_addition._add_noise import add_noise, first_past
from dpmp.noise_addition._grids import grid_of_floats
from dpmp.numerics import (
    GridArray,
    Sum,
    flatten_before_noise,
    is_grid,
    num_entries,
    round_to_grid,
    to_float,
)
from dpmp.strategies import BandedInverse, BandedToeplitz, Strategy

# The noise multiplier that is assumed for a float sum without a given sensitivity.
_LARGEST_NOISE_MULTIPLIER = 32.0

# 16 standard deviations of correlated noise have 32 bits.
_WIDEST_CORRELATED = 2**27


class NoiseState(NamedTuple):
    """The state of a privatizer: the noise of the next step is a function of it.

    Attributes:
      prng_key: the root key. It is secret: anyone who knows it can subtract the noise.
      step: int32, the number of releases made so far.
      past: what noise is correlated with, as secret as the key. With a
        `BandedToeplitz`, the noise of earlier steps: for each array of the sum, (bands
        - 1, ...) int32, where the noise of step t has index t modulo bands - 1. With a
        `BandedInverse`, one (bands - 1, 5) uint32: for each earlier step, newest first,
        a 1 and the words of its key, and zeros if there was none.
    """

    prng_key: jax.Array
    step: jax.Array
    past: tuple[jax.Array, ...] = ()

    def __repr__(self) -> str:
        return f"NoiseState(step={self.step}, prng_key=secret, past=secret)"


def gaussian_privatizer(
    *,
    stddev: float,
    prng_key: jax.Array | None = None,
    l2_sensitivity: float | None = None,
) -> optax.GradientTransformation:
    """Adds independent Gaussian noise to every entry of a sum of clipped gradients.

    >>> privatizer = gaussian_privatizer(stddev=1.0, prng_key=jax.random.key(0))
    >>> sum_of_clipped_grads = {"w": jnp.zeros(3)}
    >>> noise_state = privatizer.init(sum_of_clipped_grads)
    >>> noisy_grads, noise_state = privatizer.update(sum_of_clipped_grads, noise_state)
    >>> print(noisy_grads["w"].dtype, noise_state.step)
    float32 1

    Guarantees:
      - The computed output is as private as that of the ideal Gaussian mechanism with
        this standard deviation, up to a total variation distance (the largest
        difference in the probability of any event) below 2^-109 for each entry. To
        achieve this, the sum is expressed in integers (multiples of the unit of a
        grid), and discrete Gaussian noise on the same grid is added. Only the result is
        rounded to float32.
      - The noise of an entry is a function of the root key, the step and the place of
        the entry in the tree. No two steps share noise. A step that is run again with
        the same sum repeats its release bit for bit. With another sum it is a fault:
        both would have the same noise, so never use a state twice. Under `jax.jit`, the
        noise does not depend on the sharding of the sum, and every device draws the
        noise of its own shard. (Arrays of at most 16384 entries share a draw, which all
        devices make.) Noise is refused inside `jax.shard_map` and `jax.pmap`, where no
        device knows which part of the sum it has.
      - Without `prng_key`, each `init` draws a key of 128 bits from the operating
        system.

      An exact sum is a `GridArray`, which has a grid already. Any other sum is first
      rounded to a grid whose unit is a power of two. The rounding can move two sums
      apart by as many units as the root of the number of entries. The noise is made
      wider to cover this: at a noise multiplier of 1, by 1/4096 for up to 65,000
      entries, and by 1/1000 for a million. Entries beyond 960 standard deviations are
      cut off at that size.

    Args:
      stddev: the standard deviation of the noise, in the unit of the sum. It is the
        noise multiplier times the `.sensitivity()` of the function that computed the
        sum. (If that function divides by `normalize_by`, its sensitivity does too.) The
        noise is never narrower. On the grid of an exact sum it may be wider: by less
        than 4 % if `stddev` has at least 3000 units, and by less than 0.25 % from
        33,000 units on.
      prng_key: a secret jax key, or None to draw 128 bits from the operating system.
        Use a key for one privatizer of one run, and apply the privatizer to the whole
        sum: parts of it would get the same noise from one state. Two runs with the same
        key have the same noise, so that the difference of their outputs has no noise,
        whatever else differs. The same happens under `jax.vmap` over sums, and with two
        privatizers of one key in one optimizer.
      l2_sensitivity: the sensitivity of the sum. Rounding a float sum to a grid costs
        more noise if `stddev` is a larger multiple of the sensitivity. Without this
        argument, `stddev` is assumed to be at most 32 times the sensitivity. Exact sums
        do not need it.

    Returns:
      An `optax.GradientTransformation` with state `NoiseState` and float32 output.

    Raises:
      ValueError: if `stddev` is negative or infinite, `l2_sensitivity` is not positive,
        `prng_key` is not a jax key, a leaf is not a float array of 32 bits or more,
        `init` is called under `jax.jit` without a key, the noise has more than four
        million units of the grid, `update` is called inside `jax.shard_map` or
        `jax.pmap`, or the `stddev` for a float sum is not from 1e-24 to 1e30.

    References:
      [Canonne, Kamath, Steinke: The discrete Gaussian for differential
      privacy](https://arxiv.org/abs/2004.00010)
    """
    stddev = _validate.nonnegative(
        stddev=stddev, fix="Use noise_multiplier * clipped_grad(...).sensitivity()."
    )
    noise_multiplier = _LARGEST_NOISE_MULTIPLIER
    if l2_sensitivity is not None:
        noise_multiplier = stddev / _validate.positive(
            l2_sensitivity=l2_sensitivity, fix="Use clipped_grad(...).sensitivity()."
        )
    return _privatizer(stddev, prng_key, noise_multiplier)


def correlated_gaussian_privatizer(
    *,
    stddev: float,
    strategy: Strategy,
    prng_key: jax.Array | None = None,
) -> optax.GradientTransformation:
    """Adds Gaussian noise that partly cancels in the sum of all steps.

    >>> strategy = strategies.banded_toeplitz(4, iterations=100)
    >>> privatizer = correlated_gaussian_privatizer(stddev=1.0, strategy=strategy)

    Let W_t be independent noise with the standard deviation `stddev` times
    `strategy.sensitivity`. With a `BandedToeplitz`, the noise of step t is N_t = W_t -
    c_1 N_{t-1} - ..., which takes one draw of random bits more than independent noise.
    With a `BandedInverse`, it is N_t = W_t + d_1 W_{t-1} + ..., which takes one draw
    more for each band, and no memory. Both are computed in integers, and rounded to
    whole units of the grid.

    Guarantees:
      - All outputs together are as private as those of `gaussian_privatizer` with the
        same `stddev` and independent noise, if an example takes part in at most one of
        `strategy.bands` consecutive steps; with a `BandedInverse`, in every
        `strategy.steps_per_epoch`-th step. They are computed from C G + W, where the
        rows of G are the sums, and the rounding does not depend on G: see
        docs/proofs.md. After `strategy.iterations` steps, this would not hold, and the
        outputs are NaN.
      - What noise is correlated with is a part of the state, and is secret. A run may
        also go on from a new state with a new key, which `init` draws without a
        `prng_key`. It is as private, but earlier noise does not cancel any more.
      - Otherwise those of `gaussian_privatizer`.

    Args:
      stddev: see `gaussian_privatizer`.
      strategy: says how noise is correlated, for `strategy.iterations` steps.
      prng_key: see `gaussian_privatizer`.

    Returns:
      An `optax.GradientTransformation` with state `NoiseState` and float32 output. Its
      `init` takes a tree with the shapes of the sums.

    Raises:
      ValueError: as `gaussian_privatizer`; and by `update`, for a sum that is no
        `GridArray`. Use "exact" or "bounded" sums.

    References:
      [Choquette-Choo et al.: (Amplified) banded matrix
      factorization](https://arxiv.org/abs/2306.08153)
    """
    stddev = _validate.nonnegative(
        stddev=stddev, fix="Use noise_multiplier * clipped_grad(...).sensitivity()."
    )
    _validate.instance(
        (BandedToeplitz, BandedInverse),
        "Use dpmp.strategies.banded_toeplitz(8, iterations=...).",
        strategy=strategy,
    )
    if strategy.bands == 1:
        return gaussian_privatizer(stddev=stddev, prng_key=prng_key)
    return _privatizer(stddev, prng_key, 1.0, strategy)


def _privatizer(
    stddev: float,
    prng_key: jax.Array | None,
    noise_multiplier: float,
    strategy: Strategy | None = None,
) -> optax.GradientTransformation:
    """A privatizer; `noise_multiplier` is used for float sums."""
    if prng_key is not None:
        _random.check_key(prng_key)

    def with_noise(
        sums: list[Sum], noise_state: NoiseState
    ) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
        key_words = _random.key_words(noise_state.prng_key)
        if strategy is not None:
            grids = [x for x in sums if isinstance(x, GridArray)]
            if len(grids) != len(sums):
                _validate.fail(
                    "correlated noise must be added to sums on a grid. Use "
                    'arithmetic="exact" or "bounded".',
                    sums="of floats",
                )
            width = Fraction(stddev) * Fraction(strategy.sensitivity)
            finest = min(x.unit or 1.0 for x in grids)
            if not float(width) * strategy.noise_gain / finest <= _WIDEST_CORRELATED:
                _validate.fail(
                    f"correlated noise must have at most {_WIDEST_CORRELATED} units "
                    "of the grid. Use a lower resolution.",
                    strategy=strategy,
                )
            past = noise_state.past
            counts = [x.counts for x in grids]
            wanted = jax.eval_shape(functools.partial(first_past, strategy, counts))
            wanted, given = ([(x.shape, x.dtype) for x in xs] for xs in (wanted, past))
            if wanted[: len(past)] != given or not past:
                _validate.fail(
                    "the state must have the noise of earlier steps for this strategy "
                    "and this sum. Use the state of the init or update of this "
                    "privatizer.",
                    earlier_noise=given,
                )
            step = noise_state.step
            noisy, past = add_noise(grids, width, key_words, step, past, strategy)
            # Later steps have no guarantee, and their noise may exceed 32 bits.
            is_covered = step < strategy.iterations
            return [jnp.where(is_covered, x, jnp.nan) for x in noisy], past
        unit, widened = 1.0, Fraction(stddev)
        # Rounding some leaves moves the whole sum, so all noise must be wider.
        if not all(map(is_grid, sums)):
            rounding_cost = noise_multiplier * math.sqrt(num_entries(sums))
            unit, widened = grid_of_floats(stddev, rounding_cost)
        on_grids = [round_to_grid(x, unit) for x in sums]
        return add_noise(on_grids, widened, key_words, noise_state.step)

    def init(params: PyTree) -> NoiseState:
        key = _random.fresh_key() if prng_key is None else prng_key
        past = first_past(strategy, jax.tree.leaves(params)) if strategy else ()
        return NoiseState(key, jnp.zeros((), jnp.int32), past)

    def update(
        sum_of_clipped_grads: PyTree, noise_state: NoiseState, params: PyTree = None
    ) -> tuple[PyTree, NoiseState]:
        del params
        _meshes.check_not_mapped(
            "noise",
            "all devices would draw the same, and noise that two shards of a sum share "
            "cancels in their difference",
            fix="Return the sum from shard_map, and add the noise to it under jax.jit. "
            "There each device draws the noise of its own shard.",
        )
        given = sum_of_clipped_grads if isinstance(sum_of_clipped_grads, tuple) else ()
        if any(hasattr(x, "grad_norms") for x in given):
            _validate.fail(
                "noise must be added to the sum alone, because it is too little for "
                "the values of single examples. Pass the first part of what "
                "clipped_grad returns.",
                sum_of_clipped_grads="a sum with auxiliary output",
            )
        sums, treedef = flatten_before_noise(sum_of_clipped_grads)
        _validate.instance(
            NoiseState,
            "Use noise_state = privatizer.init(params), and then what update returns.",
            noise_state=noise_state,
        )
        if stddev:
            noisy, past = with_noise(sums, noise_state)
        else:
            noisy, past = map(to_float, sums), noise_state.past
        new_state = NoiseState(noise_state.prng_key, noise_state.step + 1, past)
        return treedef.unflatten(noisy), new_state

    update = _meshes.on_automatic_axes(update, _specs_of_noisy)
    # The cast is for the type checker: the argument names are jax_privacy's, not
    # optax's.
    return optax.GradientTransformation(init, cast("optax.TransformUpdateFn", update))


def _specs_of_noisy(specs: Any, output: Any) -> list[jax.P]:
    """Partition specs: noisy sums and past noise are sharded as they came."""
    of_past = specs[1].past
    others = len(jax.tree.leaves(output[1])) - len(of_past)
    return [*jax.tree.leaves(specs[0]), *[jax.P()] * others, *of_past]
