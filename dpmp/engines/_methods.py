"""The interface of gradient engines, and how to make one.

An engine is made from the name of a method. It differentiates the loss, or the loss
times a scale, and then removes the scale from norms and sums.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp

from dpmp import _meshes, _validate, loss_scaling
from dpmp._typing import PyTree
from dpmp.engines import _per_example, book_keeping
from dpmp.engines._signature import Signature, check_loss
from dpmp.numerics import Arithmetic, SquaredNorm, at_least_float32
from dpmp.programs import analysis

METHODS = ("per_example", "book_keeping")

# The product of this coefficient and a power of two stays finite.
_LARGEST_COEFFICIENT = 2.0**100

# On CPUs, steps of small models (benchmarks/choice.py) are fastest if the largest array
# of a microbatch has about this many entries, and its materialized gradients that many.
_ENTRIES_OF_ARRAY, _ENTRIES_OF_GRADIENTS = 2**18, 2**21

# A microbatch reads all parameters. If they are large, as in a language model, fewer
# examples take longer.
_FEWEST = 4

# On other devices, the arrays of a microbatch may take this share of the memory, as if
# all of them were float32 and in memory together.
_SHARE_OF_MEMORY = 0.25


class PerExampleGrads(Protocol):
    """The gradients of one batch or microbatch, as clipping sees them.

    Clipping never reads a gradient: an engine may hold a stack of gradients, or
    activations and cotangents. The argument `prefix` of the methods is the tree
    structure of the clip norms. Each of its leaves stands for one clipping group: the
    parameters that share one clip norm.
    """

    @property
    def values(self) -> jax.Array | None:
        """Per-example losses, (B,)."""
        ...

    @property
    def aux(self) -> PyTree:
        """Per-example auxiliary outputs, with leaves of shape (B, ...)."""
        ...

    def squared_norms(self, prefix: Any) -> list[SquaredNorm]:
        """Computes one `SquaredNorm` for each leaf of `prefix`."""
        ...

    def weighted_sum(
        self,
        clip_coefs: list[jax.Array],
        keep: jax.Array,
        prefix: Any,
        arithmetic: Arithmetic,
    ) -> PyTree:
        """Sums coefficient times gradient over the examples, up to `arithmetic.finish`.

        There are (B,) coefficients for each leaf of `prefix`. An example whose `keep`,
        (B,) bool, is False contributes exactly zero, by selection, even if its gradient
        is infinite or NaN.
        """
        ...


GradEngine: TypeAlias = Callable[..., PerExampleGrads]


def check_method(method: str, pre_clipping_transform: Any = None) -> None:
    """Raises ValueError for an unknown method, or one that cannot apply a transform."""
    _validate.one_of(METHODS, method=method)
    if pre_clipping_transform is not None and method == "book_keeping":
        _validate.fail(
            "pre_clipping_transform needs an engine that materializes gradients. Use "
            'method="per_example", or build the transform into the loss.',
            method=method,
        )


def make_engine(
    fun: Callable[..., Any],
    signature: Signature,
    *,
    method: str,
    is_bounded: bool,
    loss_scale: loss_scaling.LossScale | None = None,
    transform: Callable[[PyTree], PyTree] | None = None,
) -> tuple[GradEngine, Callable[..., int]]:
    """Makes the gradient engine of a loss as users write it.

    With `is_bounded`, norms must be upper bounds that include rounding errors. The
    other arguments are those of `clipped_grad`. Returns the engine, and a function from
    its arguments to the number of examples to process at a time.
    """
    loss_fn = signature.of_one_example(fun, check_loss)
    if loss_scale is not None:
        loss_fn = scaled(loss_fn, loss_scale)
    one_example_fn = loss_fn
    if method == "book_keeping":
        engine = book_keeping.Engine(loss_fn, signature, is_bounded)
    else:
        loss_fn = _per_example.mappable(loss_fn, signature)
        grad_fn = jax.value_and_grad(loss_fn, signature.argnums, has_aux=True)

        def for_one_example(*args: Any, **kwargs: Any) -> tuple[PyTree, Any]:
            outputs, grads = grad_fn(*args, **kwargs)
            return grads if transform is None else transform(grads), outputs

        engine = _per_example.stack_engine(for_one_example, signature)
    if loss_scale is not None:
        engine = unscaled(engine)

    holds_gradients = method == "per_example"
    return engine, functools.partial(
        _fitting_microbatch, one_example_fn, signature, holds_gradients
    )


def _fitting_microbatch(
    fun: Callable[..., Any],
    signature: Signature,
    holds_gradients: bool,
    /,
    *args: Any,
    **kwargs: Any,
) -> int:
    """Returns the number of examples whose arrays fit into a cache or the memory.

    `holds_gradients` tells whether the per-example gradients are such arrays. The loss
    `fun` is traced for one example, and nothing is computed.
    """
    of_one_example, params, example = signature.for_one_example(fun, args, kwargs)
    closed = jax.make_jaxpr(of_one_example)(params, example)
    num_params = len(jax.tree.leaves(params))
    of_example = {*closed.jaxpr.invars[num_params:]}
    sizes = [*analysis.sizes_of_dependents(closed.jaxpr, of_example), 1]
    gradient = sum(x.size for x in jax.tree.leaves(params)) if holds_gradients else 0
    if jax.local_devices()[0].platform == "cpu":
        fitting = max(_FEWEST, _ENTRIES_OF_ARRAY // max(sizes))
        fitting = min(fitting, _ENTRIES_OF_GRADIENTS // max(gradient, 1))
    else:
        memory = int(_SHARE_OF_MEMORY * _meshes.memory_of_device())
        fitting = memory // (4 * (sum(sizes) + gradient))
    return max(1, fitting)


def scaled(
    loss_fn: Callable[..., tuple[jax.Array, PyTree]], loss_scale: loss_scaling.LossScale
) -> Callable[..., tuple[jax.Array, tuple[PyTree, jax.Array, jax.Array]]]:
    """Multiplies the loss of one example by a power of two, or a function of the loss.

    The new function returns the scaled loss, float32 or wider, and (aux, loss, scale).
    """

    @functools.wraps(loss_fn)
    def scaled_loss_fn(*args: Any, **kwargs: Any) -> Any:
        value, aux = loss_fn(*args, **kwargs)
        value = jnp.asarray(value)
        wide = value.astype(at_least_float32(value.dtype))
        constant = jax.lax.stop_gradient(value)
        freed = _meshes.resharded(loss_scale)
        scale = loss_scale(constant) if callable(loss_scale) else freed
        scale = _to_power_of_two(scale)
        factor = jnp.where(jnp.isfinite(scale), scale, 1).astype(wide.dtype)
        return wide * factor, (aux, value, scale)

    return scaled_loss_fn


def _to_power_of_two(scale: Any) -> jax.Array:
    """Rounds a scale down to a power of two, in float32, limited to 2^-40 ... 2^40.

    The result is NaN if the scale is negative, infinite or NaN. Only integer operations
    read the bits of the float: a float comparison may treat a subnormal number as zero
    in one place and not in another.
    """
    scale = jnp.asarray(scale)
    if scale.shape != () or not jnp.issubdtype(scale.dtype, jnp.number):
        _validate.fail(
            "the loss_scale of an example must be one number. Return a scalar from "
            "the function, as dpmp.loss_scaling.by_loss() does.",
            shape=scale.shape,
            dtype=scale.dtype.name,
        )
    bits = jax.lax.bitcast_convert_type(scale.astype(jnp.float32), jnp.int32)
    exponent = bits >> 23  # negative for negative numbers: the sign bit is on top
    is_scale = (exponent >= 0) & (exponent < 255)
    largest = int(math.log2(loss_scaling.LARGEST))
    exponent = jnp.clip(exponent, 127 - largest, 127 + largest)
    power = jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
    return jnp.where(is_scale, power, jnp.nan)


def unscaled(engine: GradEngine) -> GradEngine:
    """Turns an engine of the scaled loss into an engine of the loss itself."""

    def run(*args: Any, **kwargs: Any) -> UnscaledGrads:
        grads = engine(*args, **kwargs)
        aux, values, scales = grads.aux
        return UnscaledGrads(values, aux, scales, grads)

    return run


@dataclass(frozen=True)
class UnscaledGrads:
    """`PerExampleGrads` of a loss, computed from those of the scaled loss.

    `scales` is (B,). An example with scale NaN contributes zero.
    """

    values: jax.Array
    aux: PyTree
    scales: jax.Array
    scaled: PerExampleGrads

    def squared_norms(self, prefix: Any) -> list[SquaredNorm]:
        """See `PerExampleGrads`."""
        return list(map(self._unscale, self.scaled.squared_norms(prefix)))

    def _unscale(self, norm: SquaredNorm) -> SquaredNorm:
        # A norm that is divided by NaN is NaN, so the example contributes zero.
        def divide(x: jax.Array) -> jax.Array:
            scales = self.scales.astype(x.dtype)
            return x / scales / scales

        # The underflow must be added before a small scale enlarges it.
        bound = norm.value if norm.bound is None else norm.bound
        bound = divide(bound + norm.underflow)
        return norm._replace(value=divide(norm.value), bound=bound)

    def weighted_sum(
        self,
        clip_coefs: list[jax.Array],
        keep: jax.Array,
        prefix: Any,
        arithmetic: Arithmetic,
    ) -> PyTree:
        """See `PerExampleGrads`."""
        coefs = [_limit(c / self.scales.astype(c.dtype)) for c in clip_coefs]
        return self.scaled.weighted_sum(coefs, keep, prefix, arithmetic)


def _limit(coefs: jax.Array) -> jax.Array:
    """Lowers coefficients to a range in which products with them are safe.

    A lower coefficient clips more, so it is always allowed. A large coefficient may
    become infinite, and infinity times zero would be NaN. A coefficient below the
    normal numbers may be rounded up by half of itself, so it becomes zero.
    """
    coefs = jnp.minimum(coefs, _LARGEST_COEFFICIENT)
    return jnp.where(coefs < 2.0**-126, jnp.zeros_like(coefs), coefs)
