"""One step of training: a sum of clipped gradients, noise, and an update.

The sum is sensitive. Only noisy values reach the update, and they are released. The
step is compiled once for a whole run.
"""

import functools
import hashlib
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpmp import _meshes, _random, _validate
from dpmp._typing import PyTree
from dpmp.clipping import AuxiliaryOutput
from dpmp.clipping._clipped_sum import specs_of_examples
from dpmp.engines.book_keeping._relative_cost import relative_cost
from dpmp.loss_scaling import DynamicScale, LossScale
from dpmp.mechanism import DPSGD, Released
from dpmp.precision import Policy
from dpmp.programs import _transformations
from dpmp.runs._checkpoints import checksums
from dpmp.training._check_program import check_program
from dpmp.training._checks import explained, with_checked_result
from dpmp.training._keys import RunKeys
from dpmp.training._settled import placement, places, put_together, strongly_typed
from dpmp.training._state import TrainingState


@dataclass(frozen=True, kw_only=True)
class Step:
    """Makes and runs the program of a step; `DPTrainer` documents the attributes.

    There is one program for each combination of types and shardings. It is traced once,
    so that later changes of Python values that the loss or the optimizer reads, such as
    a global learning rate, change nothing of a run.
    """

    mechanism: DPSGD
    loss_fn: Callable[..., jax.Array]
    optimizer: optax.GradientTransformation
    policy: Policy
    uses_prng_key: bool
    loss_scale: LossScale | DynamicScale | None
    _programs: list["_Program"] = field(default_factory=list, init=False)

    @property
    def metric_names(self) -> frozenset[str]:
        """The names of the noisy metrics that every step releases."""
        return frozenset({*self.mechanism.metric_names, "overflowed"})

    @property
    def dynamic_scale(self) -> DynamicScale | None:
        """The loss scale if it is a `DynamicScale`, or else None."""
        return self.loss_scale if isinstance(self.loss_scale, DynamicScale) else None

    def first_state(self, params: PyTree, keys: RunKeys) -> TrainingState:
        """The state before the first step, without its fingerprint."""
        policy, dynamic = self.policy, self.dynamic_scale
        params = jax.tree.map(jnp.copy, policy.cast_to_param(params))
        opt_state = self.optimizer.init(policy.cast_to_update(params))
        unknown = jnp.full((), jnp.nan, jnp.float32)
        return TrainingState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            # A transformation may keep the parameters themselves. They are copied,
            # because no array of the state may be donated twice.
            opt_state=strongly_typed(jax.tree.map(jnp.copy, opt_state)),
            noise_state=self.mechanism.privatizer(keys.noise).init(params),
            sampling_key=keys.sampling,
            model_key=keys.model,
            scale_state=dynamic and dynamic.init(),
            metrics={name: jnp.copy(unknown) for name in self.metric_names},
            update_key=keys.update if policy.stochastic_rounding else None,
            clip_norm=self.mechanism.initial_clip_norm,
        )

    def run(
        self, state: TrainingState, batch: PyTree, is_padding: Any
    ) -> tuple[TrainingState, tuple[jax.Array, jax.Array]]:
        """Runs the step; returns the new state and the sensitive losses and norms."""
        # jax's debug flags look at all arrays, those of the batch and the results. They
        # would show in an exception that an example, or its gradient, is not finite.
        # Without jit, each operation would be visible.
        with jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False):
            program, args = self._prepare(state, batch, is_padding)
            try:
                results = program.compiled(*args, program.constants)
            except BaseException:
                # Other batches may run, for example of shorter examples.
                if not program.has_run:
                    self._programs.remove(program)
                raise
            program.has_run = True
            return results

    def describe(self, state: TrainingState, batch: PyTree, is_padding: Any) -> str:
        """A hash of the program of the step, and of the arrays that the loss uses.

        Two steps with the same hash, state and batch give the same results on the same
        machine. Nothing of the state or the batch goes into it but their types. If the
        program calls functions on the host, nobody can say what they do, and if it uses
        jax.lax.rng_uniform, it has a state that nobody saves. Then the hash is another
        one each time.
        """
        with jax.disable_jit(False):
            program, _ = self._prepare(state, batch, is_padding)
        text, constants = program.lowered.as_text(), program.constants
        if re.search(r"callback|stablehlo\.(send|rng)\b", text):
            text += secrets.token_hex()
        sums = np.asarray(checksums(constants)).tobytes() if constants else b""
        return hashlib.blake2b(text.encode() + sums, digest_size=16).hexdigest()

    def _prepare(
        self, state: TrainingState, batch: PyTree, is_padding: Any
    ) -> tuple["_Program", tuple[Any, ...]]:
        """Returns the program for a state and a batch, and its arguments."""
        self._check_size(batch, is_padding)
        batch = jax.tree.map(jnp.asarray, batch)
        state = put_together(state, batch)
        args = state, batch, jnp.asarray(is_padding)
        of_state, of_batch = (str(jax.tree.map(jax.typeof, x)) for x in (state, batch))
        placed = placement(args)
        same_state = [x for x in self._programs if x.of_state == of_state]
        # The message shows nothing of the batch: its shapes may reveal its content.
        if any(x.of_batch != of_batch for x in same_state):
            raise _validate.RefusedError(
                "all batches must have the same tree, shapes and dtypes, because "
                "another compilation would reveal what is in them; got other ones. "
                "Pad examples to one size (see dpmp.Source), and use "
                "another DPTrainer for other data."
            )
        for program in same_state:
            if program.placed == placed:
                return program, args
        step, constants = self.make_program(state, batch)
        lowered = step.lower(*args, constants)
        program = _Program(of_state, of_batch, placed, lowered, constants)
        self._programs.append(program)
        return program, args

    def _check_size(self, batch: PyTree, is_padding: Any) -> None:
        size = self.mechanism.padded_batch_size
        sizes = {jnp.shape(x)[:1] for x in jax.tree.leaves((batch, is_padding))}
        # The message does not show the given size: the number of examples is sensitive.
        if sizes != {(size,)}:
            raise _validate.RefusedError(
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
            check = functools.partial(
                check_program,
                num_params=len(jax.tree.leaves(args[0])),
                takes_key=bool(keys),
                compute_dtype=self.policy.compute_dtype,
            )
            loss_fn, constants = _transformations.hoist_constants(
                loss_fn, *args, *keys, check=check
            )

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
            released = self.mechanism.split(noisy, clip_norm=state.clip_norm)
            new_state = self._release(released, noise_state, state)
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

    def cost_of_book_keeping(self, state: TrainingState, example: PyTree) -> float:
        """Estimates it from shapes, over the cost of method="per_example"."""
        keys = (state.model_key,) if self.uses_prng_key else ()
        args = jax.eval_shape(self._loss_args, *_meshes.shapes((state, example)))
        return relative_cost(lambda *args: self.loss_fn(*args, *keys), *args)

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
            clip_norm=state.clip_norm,
            return_values=True,
            return_grad_norms=True,
            loss_scale=state.scale_state.scale if dynamic else self.loss_scale,
            counts_overflows=True,
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
            metrics={**released.metrics, "overflowed": self._overflowed(released)},
            clip_norm=released.clip_norm,
        )

    def _overflowed(self, released: Released) -> jax.Array:
        """The noisy fraction of examples whose gradient is not finite.

        Its release costs nothing (`clipping/_joint_sums.py`). The size of the batch is
        sensitive, so that the expected size stands in for it.
        """
        return released.num_overflows / self.mechanism.expected_batch_size


@dataclass(eq=False)
class _Program:
    """The program of a step for the types and the shardings of its arguments."""

    of_state: str
    of_batch: str
    placed: tuple[Any, ...]  # the shardings of the arguments
    lowered: jax.stages.Lowered
    constants: list[jax.Array]  # arrays that the loss uses
    has_run: bool = False

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        return self.lowered.compile()
