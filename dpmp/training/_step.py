"""One step of training: a sum of clipped gradients, noise, and an update.

The sum is sensitive. Only noisy values reach the update, and they are released.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from dpmp import _meshes, _validate, runs
from dpmp._arrays import as_device_dtypes
from dpmp._meshes import places, strongly_typed
from dpmp._typing import PyTree
from dpmp.clipping import AuxiliaryOutput, Shards, specs_of_examples
from dpmp.loss_scaling import DynamicScale, LossScale, ScaledLoss
from dpmp.mechanism import DPSGD, Released
from dpmp.noise_addition import NoiseState, first_past
from dpmp.precision import Policy
from dpmp.programs import frozen, losses
from dpmp.strategies import BandedInverse
from dpmp.training._state import TrainingState

# The names of the secret keys that a step takes from its ticket.
KEYS = ("noise", "model", "update")


@dataclass(frozen=True, kw_only=True)
class Step:
    """Makes the program of a step; `DPTrainer` documents the attributes.

    The program is traced once. So later changes of Python values that the loss or the
    optimizer reads, such as a global learning rate, do not affect a run.
    """

    mechanism: DPSGD
    loss_fn: Callable[..., jax.Array]
    optimizer: optax.GradientTransformation
    policy: Policy
    uses_prng_key: bool
    loss_scale: LossScale | DynamicScale | None

    @property
    def dynamic_scale(self) -> DynamicScale | None:
        """The loss scale if it is a `DynamicScale`, and None otherwise."""
        return self.loss_scale if isinstance(self.loss_scale, DynamicScale) else None

    def first_state(self, params: PyTree) -> TrainingState:
        """The state before the first step, without `spent`."""
        policy, dynamic = self.policy, self.dynamic_scale
        metrics = {*self.mechanism.metric_names, "overflowed"}
        with jax.debug_nans(False):  # metrics are NaN before the first step
            params = jax.tree.map(jnp.copy, policy.cast_to_param(params))
            with _explained("init(params)"):
                opt_state = self.optimizer.init(policy.cast_to_update(params))
            unknown = jnp.full((), jnp.nan, jnp.float32)
            return TrainingState(
                step=jnp.zeros((), jnp.int32),
                params=params,
                # `opt_state` may hold the parameters themselves. They are copied,
                # because no array of the state may be donated twice.
                opt_state=strongly_typed(jax.tree.map(jnp.copy, opt_state)),
                scale_state=dynamic and dynamic.init(),
                metrics={name: jnp.copy(unknown) for name in metrics},
                clip_norm=self.mechanism.initial_clip_norm,
            )

    def first_past(self, state: TrainingState) -> tuple[jax.Array, ...]:
        """What correlated noise of the first step depends on."""
        strategy, leaves = self.mechanism.strategy, jax.tree.leaves(state.params)
        if strategy is None or not self.mechanism.has_correlated_noise:
            return ()
        make = functools.partial(first_past, strategy, leaves)
        return jax.jit(make, out_shardings=self._places_of_past(state))()

    def _places_of_past(self, state: TrainingState) -> tuple[Any, ...]:
        """Noise is sharded like the parameters, and keys are on every device."""
        if not self.mechanism.has_correlated_noise:
            return ()
        if isinstance(self.mechanism.strategy, BandedInverse):
            return (places(state.step),)
        return tuple(map(_meshes.place_of_stack, jax.tree.leaves(state.params)))

    def make_program(
        self,
        state: TrainingState,
        batch: PyTree,
        spec_of: Callable[[Any], jax.P] = _meshes.spec_of,
    ) -> tuple[jax.stages.Wrapped, list[Any]]:
        """Returns the step, and the arrays of the loss that are its last argument.

        `spec_of` returns the partition spec of such an array.
        """
        loss, constants, shards = self._hoisted(state, batch, spec_of)
        mesh = _meshes.mesh_of((batch, state))

        def step(state, keys, batch, is_padding, past, constants):
            """Makes one step under tracing; see docs/architecture.md."""
            keys = dict(zip(KEYS, keys, strict=True))
            total, sensitive = self._sum_sensitive(
                loss, state, keys["model"], batch, is_padding, constants, shards
            )
            # All values above this line are sensitive. The next state has noisy values
            # only.
            noise_key = jax.random.wrap_key_data(keys["noise"], impl="threefry4x32")
            privatizer = self.mechanism.privatizer(noise_key)
            noise_state = NoiseState(noise_key, state.step, past)
            noisy, next_noise = privatizer.update(total, noise_state)
            released = self.mechanism.split(noisy, clip_norm=state.clip_norm)
            new_state = self._release(released, keys["update"], state)
            # Otherwise no checkpoint of the run could be restored.
            runs.check_same_types(
                "an optimizer must return parameters and a state of the shapes and "
                "dtypes that it was given. Make its state in `init` as `update` "
                "returns it.",
                given=runs.types_of(state),
                returned=runs.types_of(new_state),
            )
            outputs = sensitive.values, sensitive.grad_norms
            return new_state, outputs, cast("NoiseState", next_noise).past

        def step_on_mesh(*args):
            with _meshes.within(mesh):
                return step(*args)

        def out_specs(specs, output):
            per_example = specs_of_examples(output[1], specs[1])
            return [*jax.tree.leaves(specs[0]), *per_example, *specs[4]]

        program = jax.jit(
            _meshes.on_automatic_axes(step_on_mesh, out_specs),
            donate_argnums=(0, 4),
            out_shardings=(places(state), None, self._places_of_past(state)),
        )
        return program, constants

    def _hoisted(
        self, state: TrainingState, batch: PyTree, spec_of: Callable[[Any], jax.P]
    ) -> tuple[Callable[..., jax.Array], list[Any], Shards]:
        """The loss with `constants` and `drawn`, the constants, and where rows are."""
        policy, mechanism = self.policy, self.mechanism
        args = self.loss_shapes(state, batch, rows=slice(1))
        drawn = jax.eval_shape(self._drawn, state.step, state.params)
        checked_fn = losses.with_checked_result(self.loss_fn)

        def loss_fn(*inputs):
            given, drawn = inputs[: len(args)], inputs[len(args) :]
            return policy.in_product_precision(checked_fn, *drawn)(*given)

        check = functools.partial(
            losses.check_program,
            params=[
                jax.tree_util.keystr(path)
                for path, _ in jax.tree_util.tree_leaves_with_path(args[0])
            ],
            num_columns=len(jax.tree.leaves(args[1])),
            takes_key=self.uses_prng_key,
            compute_dtype=policy.compute_dtype,
            float32_paths=() if policy.stochastic_rounding else policy.float32_paths,
            num_examples=None if mechanism.hides_size else mechanism.num_examples,
        )
        of_params = jax.tree.map(_meshes.spec_of, state.params)
        # Per-example gradients take more memory than all parameters do.
        is_lean = mechanism.method == "book_keeping"
        arg_specs = [x if is_lean else jax.P() for x in jax.tree.leaves(of_params)]
        hoist = functools.partial(
            frozen.hoist_constants,
            loss_fn,
            *args,
            *drawn,
            check=check,
            spec_of=spec_of,
            arg_specs=arg_specs,
        )
        with losses.explained(args[1], policy.compute_dtype):
            hoisted, constants, specs = _meshes.traced_outside(hoist)

        axes = _meshes.axes_of_rows(jax.tree.leaves(batch)[0])
        of_drawn = [jax.P()] * len(drawn)
        shards = Shards(axes, of_params, {"constants": specs, "drawn": of_drawn})

        def loss(*args, constants, drawn):
            return hoisted(constants, *args, *drawn)

        return loss, constants, shards

    def lower(self, state: TrainingState, batch: PyTree) -> jax.stages.Lowered:
        """The program for a state and a batch, or for their shapes."""
        state, batch = state._replace(spent=None), as_device_dtypes(batch)
        program, constants = self.make_program(state, batch)
        shape = (self.mechanism.padded_batch_size,)
        is_padding = jax.ShapeDtypeStruct(shape, jnp.bool_)
        keys = [jax.ShapeDtypeStruct((4,), jnp.uint32)] * len(KEYS)
        past = jax.eval_shape(lambda: self.first_past(state))
        return program.lower(state, keys, batch, is_padding, past, constants)

    def microbatch_size(self, state: TrainingState, batch: PyTree) -> int:
        """The number of examples that are processed at a time, from shapes alone."""
        argnum = 2 if self.uses_prng_key else None
        grad_fn = self.mechanism.clipped_grad(
            self.loss_fn, clip_norm=state.clip_norm, prng_argnum=argnum
        )
        return grad_fn.microbatch_size(*self.loss_shapes(state, batch))

    def loss_shapes(
        self, state: TrainingState, batch: PyTree, rows: slice = slice(None)
    ) -> list[Any]:
        """The shapes of the arguments of the loss, for some rows of a batch."""

        def args(state, batch, words):
            rows_of_batch = jax.tree.map(lambda x: x[rows], batch)
            return self._loss_args(state, rows_of_batch, words)

        words = jax.ShapeDtypeStruct((4,), jnp.uint32)
        return jax.eval_shape(args, *_meshes.shapes((state, batch)), words)

    def _loss_args(
        self, state: TrainingState, batch: PyTree, model_words: jax.Array
    ) -> list[Any]:
        """The arguments of the loss: parameters and batch in the compute dtype, a key.

        A cast inside the loss would return the gradients in float32.
        """
        policy = self.policy
        args = [policy.cast_to_compute(state.params), policy.cast_inputs(batch)]
        if self.uses_prng_key:  # of jax's default generator
            args += [jax.random.wrap_key_data(model_words[:2], impl="threefry2x32")]
        return args

    def _sum_sensitive(
        self,
        loss_fn: Callable[..., jax.Array],
        state: TrainingState,
        model_words: jax.Array,
        batch: PyTree,
        is_padding: jax.Array,
        constants: list[jax.Array],
        shards: Shards,
    ) -> tuple[PyTree, AuxiliaryOutput]:
        """Returns the sum of clipped gradients, and the outputs of each example."""
        dynamic = self.dynamic_scale
        scale: Any = state.scale_state.scale if dynamic else self.loss_scale
        grad_fn = self.mechanism.clipped_grad(
            loss_fn if scale is None else ScaledLoss(loss_fn, scale),
            clip_norm=state.clip_norm,
            counts_overflows=True,
            return_values=True,
            return_grad_norms=True,
            prng_argnum=2 if self.uses_prng_key else None,
            spmd_axis_name=shards,
        )
        args = self._loss_args(state, batch, model_words)
        specs: Any = shards.kwarg_specs
        constants = frozen.with_parts(constants, args[0], specs["constants"])
        drawn = self._drawn(state.step, args[0])
        return grad_fn(
            *args, is_padding_example=is_padding, constants=constants, drawn=drawn
        )

    def _drawn(self, step: jax.Array, params: PyTree) -> list[jax.Array]:
        """What a policy draws for a step, as further arguments of the loss."""
        drawn = self.policy.draw_rounded(step, params)
        return [] if drawn is None else [drawn]

    def _release(
        self, released: Released, update_words: jax.Array, state: TrainingState
    ) -> TrainingState:
        """Makes the next state from noisy values alone."""
        key, scale_state = None, None
        if self.policy.stochastic_rounding:
            key = jax.random.wrap_key_data(update_words, impl="threefry4x32")
        if self.dynamic_scale is not None:
            scale_state = self.dynamic_scale.update(
                state.scale_state,
                released.num_overflows,
                stddev=self.mechanism.overflow_stddev,
            )
        # This fraction costs nothing (`clipping/_joint_sums.py`). The size of the batch
        # is sensitive, so that the expected size stands in for it.
        overflowed = released.num_overflows / self.mechanism.expected_batch_size
        noisy, params = map(
            self.policy.cast_to_update, (released.noisy_grads, state.params)
        )
        try:
            with _explained("update(updates, state, params)"):
                updates, opt_state = self.optimizer.update(
                    noisy, state.opt_state, params
                )
        except TypeError as error:
            _validate.fail(
                "optimizer.update must be a function of (updates, state, params). An "
                "optimizer that asks for losses, as a line search does, cannot have "
                "them, because they have no noise: use optax.adam(1e-3), say.",
                reason=str(error),
            )
        # Some nodes, such as modules of NNX, are equal to themselves alone.
        given, wanted = jax.tree.flatten(updates), jax.tree.flatten(noisy)
        shapes = [list(map(jnp.shape, leaves)) for leaves, _ in (given, wanted)]
        if given[1] != wanted[1] or shapes[0] != shapes[1]:
            _validate.fail(
                "the updates of the optimizer must have the shapes of the parameters. "
                "Use an optimizer that is given one mean gradient: dpmp clips and "
                "adds noise.",
                updates=shapes[0],
                parameters=shapes[1],
            )
        return state._replace(
            step=state.step + 1,
            params=self.policy.apply_updates(state.params, updates, key),
            opt_state=strongly_typed(opt_state),
            scale_state=scale_state,
            metrics={**released.metrics, "overflowed": overflowed},
            clip_norm=released.clip_norm,
        )


@contextlib.contextmanager
def _explained(call: str) -> Iterator[None]:
    """Adds to an error of the optimizer what it was given."""
    try:
        yield
    except Exception as error:
        error.add_note(
            f"dpmp: this happened in optimizer.{call}. The updates are one noisy mean "
            "gradient, a tree like params. An optimizer that clips per-example "
            "gradients itself is not needed; one whose params have another tree "
            "(optax.lookahead) needs a training loop of its own: docs/recipes.md."
        )
        raise
