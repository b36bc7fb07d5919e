"""The memory of a training step, as the compiler reports it.

The step does what `DPTrainer` does between a batch and new parameters: it clips and
sums gradients and adds noise, and the optimizer updates the parameters in their own
buffers. The step is compiled and never run, so shapes are enough.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.clipping import BoundedSensitivityCallable, clipped_grad
from dpmp.engines._signature import Signature
from dpmp.noise_addition import gaussian_privatizer
from dpmp.numerics._arithmetic import default_name, parse
from dpmp.numerics._grid import DEFAULT_RESOLUTION, LARGEST_RESOLUTION
from dpmp.precision import Policy
from dpmp.programs import _transformations


@dataclass(frozen=True)
class CompiledMemory:
    """The compiler's report on a step.

    Attributes:
      arguments: bytes of its arguments.
      outputs: bytes of its results.
      aliased: bytes of the results that reuse the buffers of donated arguments.
      temporary: bytes that it allocates in addition, while it runs.
    """

    arguments: int
    outputs: int
    aliased: int
    temporary: int

    @property
    def total(self) -> int:
        """All bytes, with donated buffers counted once."""
        return self.arguments + self.outputs - self.aliased + self.temporary

    def __str__(self) -> str:
        return f"{self.total / 1e6:.2f} MB, {self.temporary / 1e6:.2f} of it temporary"


def compiled_memory(
    loss_fn: Callable[..., jax.Array],
    params: PyTree,
    batch: PyTree,
    *,
    policy: Policy | str,
    optimizer: optax.GradientTransformation,
    method: str = "per_example",
    microbatch_size: int | None = None,
    arithmetic: str | None = None,
) -> CompiledMemory:
    """Compiles a training step for this device, and returns the compiler's figures.

    Nothing is run or allocated, so the model may be larger than the device. The figures
    hold for this device and this version of the compiler.

    >>> shape = jax.ShapeDtypeStruct
    >>> compiled = compiled_memory(
    ...     lambda w, x: ((x @ w) ** 2).mean(),
    ...     shape((1000,), "float32"),
    ...     shape((8, 1000), "float32"),
    ...     policy="mixed_bfloat16",
    ...     optimizer=optax.sgd(1e-3),
    ... )
    >>> compiled.temporary > 8 * 2 * 1000  # gradients of 8 examples in bfloat16
    True

    Args:
      loss_fn: `loss_fn(params, batch)`, as in `clipped_grad`. Arrays that it closes
        over count as arguments of the step.
      params: as in `estimate_memory`, and so are all arguments below.
      batch: arrays or shapes.
      policy: the dtypes.
      optimizer: any optax transformation.
      method: the gradient engine.
      microbatch_size: the number of examples at a time.
      arithmetic: the arithmetic of the sum.

    Returns:
      A `CompiledMemory`.

    Raises:
      ValueError: as `clipped_grad`, and where the compiler reports nothing.
    """
    policy = Policy.from_name(policy) if isinstance(policy, str) else policy
    arithmetic = arithmetic or default_name(method)
    clip = functools.partial(
        clipped_grad,
        l2_clip_norm=1.0,
        return_values=True,
        return_grad_norms=True,
        method=method,
        microbatch_size=microbatch_size,
        arithmetic=arithmetic,
        resolution=_resolution(arithmetic, method, params),
    )
    lowered = _lower_step(loss_fn, params, batch, policy, optimizer, clip)
    analysis = lowered.compile().memory_analysis()
    if analysis is None:
        _validate.fail(
            "the compiler must report the memory of a program",
            backend=jax.default_backend(),
            fix="Use estimate_memory alone.",
        )
    return CompiledMemory(
        analysis.argument_size_in_bytes,
        analysis.output_size_in_bytes,
        analysis.alias_size_in_bytes,
        analysis.temp_size_in_bytes,
    )


def _resolution(arithmetic: str, method: str, params: PyTree) -> int | None:
    """The resolution that `DPSGD` chooses for these parameters; None without a grid."""
    num_parameters = sum(math.prod(jnp.shape(x)) for x in jax.tree.leaves(params))
    wanted = parse(arithmetic, method=method).wanted_resolution(num_parameters)
    if wanted is None:
        return None
    return min(max(math.ceil(wanted), DEFAULT_RESOLUTION), LARGEST_RESOLUTION)


def _lower_step(
    loss_fn: Callable[..., jax.Array],
    params: PyTree,
    batch: PyTree,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    clip: Callable[[Callable[..., jax.Array]], BoundedSensitivityCallable],
) -> jax.stages.Lowered:
    """The step, ready to be compiled. Its first argument and result are its state."""

    def init(params: PyTree, key: jax.Array) -> tuple[Any, ...]:
        params = policy.cast_to_param(params)
        opt_state = optimizer.init(policy.cast_to_update(params))
        noise_state = gaussian_privatizer(stddev=1.0, prng_key=key).init(params)
        return params, opt_state, noise_state, key

    def loss_args(params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        return policy.cast_to_compute(params), policy.cast_inputs(batch)

    def update(
        state: tuple[Any, ...],
        batch: PyTree,
        is_padding: jax.Array,
        constants: list[Any],
    ) -> tuple[tuple[Any, ...], PyTree]:
        params, opt_state, noise_state, key = state
        grad_fn = clip(functools.partial(hoisted, constants))
        privatizer = gaussian_privatizer(
            stddev=grad_fn.l2_norm_bound,
            prng_key=noise_state.prng_key,
            l2_sensitivity=grad_fn.l2_norm_bound,
        )
        total, sensitive = grad_fn(
            *loss_args(params, batch), is_padding_example=is_padding
        )
        noisy_grads, noise_state = privatizer.update(total, noise_state)
        updates, opt_state = optimizer.update(
            policy.cast_to_update(noisy_grads), opt_state, policy.cast_to_update(params)
        )
        params = policy.apply_updates(params, updates, key)
        return (params, opt_state, noise_state, key), sensitive

    signature = Signature.parse(argnums=0, batch_argnums=1)
    batch_size = signature.batch_size((params, batch))
    is_padding = jax.ShapeDtypeStruct((batch_size,), bool)
    example = jax.eval_shape(lambda x: jax.tree.map(lambda x: x[:1], x), batch)
    # The step is never run, so any key will do.
    state = jax.eval_shape(init, params, jax.random.key(0))
    hoisted, constants = _transformations.hoist_constants(
        policy.in_product_precision(loss_fn),
        *jax.eval_shape(loss_args, state[0], example),
    )
    program = jax.jit(update, donate_argnums=0)
    return program.lower(state, batch, is_padding, constants)
