"""One step of training: a sum of clipped gradients, noise, and an update.

The sum is sensitive. Only noisy values reach the update, and they are released. The
step is compiled once for a whole run.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpmp import _meshes, _random
from dpmp._typing import PyTree
from dpmp.clipping import AuxiliaryOutput
from dpmp.clipping._clipped_sum import specs_of_examples
from dpmp.loss_scaling import DynamicScale, LossScale
from dpmp.mechanism import DPSGD, Released
from dpmp.precision import Policy
from dpmp.programs import _transformations
from dpmp.training._checks import explained, with_checked_result
from dpmp.training._settled import placement, places, put_together, strongly_typed
from dpmp.training._state import TrainingState


@dataclass(frozen=True, kw_only=True)
class Step:
    """Makes and runs the program of a step; `DPTrainer` documents the attributes.

    There is one program for each combination of types and shardings of the state.
    """

    mechanism: DPSGD
    loss_fn: Callable[..., jax.Array]
    optimizer: optax.GradientTransformation
    policy: Policy
    uses_prng_key: bool
    loss_scale: LossScale | DynamicScale | None
    _compiled: dict[Any, tuple[str, jax.stages.Wrapped, list[Any]]] = field(
        default_factory=dict, init=False
    )

    @property
    def dynamic_scale(self) -> DynamicScale | None:
        """The loss scale if it is a `DynamicScale`, or else None."""
        return self.loss_scale if isinstance(self.loss_scale, DynamicScale) else None

    def run(
        self, state: TrainingState, batch: PyTree, is_padding: Any
    ) -> tuple[TrainingState, tuple[jax.Array, jax.Array]]:
        """Runs the step; returns the new state and the sensitive losses and norms."""
        # jax's debug flags look at all arrays, those of the batch and the results. They
        # would show in an exception that an example, or its gradient, is not finite.
        with jax.debug_nans(False), jax.debug_infs(False):
            self._check_size(batch, is_padding)
            batch = jax.tree.map(jnp.asarray, batch)
            state = put_together(state, batch)
            types, of_batch = (str(jax.tree.map(jax.typeof, x)) for x in (state, batch))
            axes = _meshes.axes_of_rows(jax.tree.leaves(batch)[0])
            of_state = types, axes, placement(state)
            compiled = self._compiled.get(of_state)
            compiled = compiled or (of_batch, *self.make_program(state, batch))
            compiled_for, program, constants = compiled
            # The message shows nothing of the batch: its shapes may reveal its content.
            if of_batch != compiled_for:
                raise ValueError(
                    "all batches must have the same tree, shapes and dtypes, because "
                    "another compilation would reveal what is in them; got other ones. "
                    "Pad examples to one size (see dpmp.Source), and use "
                    "another DPTrainer for other data."
                )
            outputs = program(state, batch, jnp.asarray(is_padding), constants)
            # Only a program that ran is worth keeping.
            self._compiled[of_state] = compiled
            return outputs

    def _check_size(self, batch: PyTree, is_padding: Any) -> None:
        size = self.mechanism.padded_batch_size
        sizes = {jnp.shape(x)[:1] for x in jax.tree.leaves((batch, is_padding))}
        # The message does not show the given size: the number of examples is sensitive.
        if sizes != {(size,)}:
            raise ValueError(
                f"every batch must be padded to {size} examples; got another number. "
                f"Pad it, and mark the padding in is_padding_example."
            )

    def make_program(
        self, state: TrainingState, batch: PyTree
    ) -> tuple[jax.stages.Wrapped, list[Any]]:
        """Returns the step, and the arrays of the loss that are its last argument."""

        def example_args(state, batch):
            return self._loss_args(state, jax.tree.map(lambda x: x[:1], batch))

        args = jax.eval_shape(example_args, *_meshes.shapes((state, batch)))
        keys = (state.model_key,) if self.uses_prng_key else ()
        loss_fn = self.policy.in_product_precision(with_checked_result(self.loss_fn))
        with explained(args[1], self.policy.compute_dtype):
            loss_fn, constants = _transformations.hoist_constants(loss_fn, *args, *keys)

        axes = _meshes.axes_of_rows(jax.tree.leaves(batch)[0]) or None
        mesh = _meshes.mesh_of((batch, state))
        placement = axes, jax.tree.map(_meshes.spec_of, state.params)

        def step(state, batch, is_padding, constants):
            """Makes one step under tracing; see docs/architecture.md."""

            def loss(*args):
                return loss_fn(jax.tree.map(_meshes.freed, constants), *args)

            total, sensitive = self._sum_sensitive(
                loss, state, batch, is_padding, placement
            )
            # All values above this line are sensitive. The next state has noisy values
            # only.
            privatizer = self.mechanism.privatizer(state.noise_state.prng_key)
            noisy, noise_state = privatizer.update(total, state.noise_state)
            new_state = self._release(self.mechanism.split(noisy), noise_state, state)
            return new_state, (sensitive.values, sensitive.grad_norms)

        def step_on_mesh(*args):
            with _meshes.within(mesh):
                return step(*args)

        def out_specs(specs, output):
            per_example = specs_of_examples(output[1], specs[1])
            return [*jax.tree.leaves(specs[0]), *per_example]

        step_on_mesh = _meshes.on_automatic_axes(step_on_mesh, out_specs)
        program = jax.jit(
            step_on_mesh, donate_argnums=0, out_shardings=(places(state), None)
        )
        return program, constants

    def _loss_args(self, state: TrainingState, batch: PyTree) -> tuple[PyTree, PyTree]:
        """The arguments of the loss: parameters and batch in the compute dtype."""
        policy = self.policy
        return policy.cast_to_compute(state.params), policy.cast_inputs(batch)

    def _sum_sensitive(
        self,
        loss_fn: Callable[..., jax.Array],
        state: TrainingState,
        batch: PyTree,
        is_padding: jax.Array,
        placement: tuple[tuple[str, ...] | None, PyTree],
    ) -> tuple[PyTree, AuxiliaryOutput]:
        """Returns the sum of clipped gradients, and the outputs of each example.

        `placement` has the axes of the mesh that divide the batch, and the partition
        specs of the parameters.
        """
        dynamic = self.dynamic_scale
        grad_fn = self.mechanism.clipped_grad(
            loss_fn,
            return_values=True,
            return_grad_norms=True,
            loss_scale=state.scale_state.scale if dynamic else self.loss_scale,
            counts_overflows=dynamic is not None,
            prng_argnum=2 if self.uses_prng_key else None,
            spmd_axis_name=placement[0],
            sum_specs=placement[1],
        )
        # A cast inside the loss would return the gradients in float32.
        args = self._loss_args(state, batch)
        if self.uses_prng_key:
            args = (*args, _random.fold_in(state.model_key, state.step))
        return grad_fn(*args, is_padding_example=is_padding)

    def _release(
        self, released: Released, noise_state: Any, state: TrainingState
    ) -> TrainingState:
        """Makes the next state from noisy values alone."""
        key, scale_state = state.update_key, None
        if key is not None:
            key = _random.fold_in(key, state.step)
        if self.dynamic_scale is not None:
            scale_state = self.dynamic_scale.update(
                state.scale_state,
                released.num_overflows,
                stddev=self.mechanism.overflow_stddev,
            )
        updates, opt_state = self.optimizer.update(
            self.policy.cast_to_update(released.noisy_grads),
            state.opt_state,
            self.policy.cast_to_update(state.params),
        )
        return state._replace(
            step=state.step + 1,
            params=self.policy.apply_updates(state.params, updates, key),
            opt_state=strongly_typed(opt_state),
            noise_state=noise_state,
            scale_state=scale_state,
            metrics=released.metrics,
        )
