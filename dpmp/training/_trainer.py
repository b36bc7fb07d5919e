"""DPTrainer: from a mechanism, a loss and an optimizer to a training run.

Sampling, loading and the loop are on the host; everything between a batch and the
updated parameters is one compiled step. What the step returns is released, and what
goes into it is not shown to anyone.
"""

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpmp import _random, _validate, accounting, loss_scaling
from dpmp._numbers import as_number
from dpmp._typing import PyTree
from dpmp.loss_scaling import DynamicScale, LossScale
from dpmp.mechanism import DPSGD
from dpmp.precision import Policy
from dpmp.programs import _float8
from dpmp.training import _fingerprint
from dpmp.training._programs import Programs
from dpmp.training._progress import Progress
from dpmp.training._settled import put_together, strongly_typed
from dpmp.training._source import Source as Source
from dpmp.training._source import as_source, load_batch
from dpmp.training._state import SensitiveOutputs as SensitiveOutputs
from dpmp.training._state import TrainingState as TrainingState
from dpmp.training._step import Step


@dataclass(frozen=True, kw_only=True)
class DPTrainer:
    """Trains with the mechanism it is given, and with nothing else.

    >>> mechanism = DPSGD(
    ...     num_examples=64,
    ...     expected_batch_size=16,
    ...     iterations=3,
    ...     l2_clip_norm=1.0,
    ...     noise_multiplier=1.0,
    ... )
    >>> trainer = DPTrainer(
    ...     mechanism=mechanism,
    ...     loss_fn=lambda w, batch: jnp.mean((batch["x"] @ w - batch["y"]) ** 2),
    ...     optimizer=optax.sgd(0.1),
    ...     policy=Policy.from_name("mixed_bfloat16"),
    ... )
    >>> state = trainer.init(jnp.zeros(5))
    >>> data = {"x": np.ones((64, 5), np.float32), "y": np.ones(64, np.float32)}
    >>> state = trainer.fit(state, data, progress=False)
    >>> print(state.step, state.params.dtype)
    3 float32

    Guarantees:
      `TrainingState.params` and `.opt_state` after any number of steps are covered by
      `mechanism.guarantee(step)`. No un-noised value is returned, logged or used to
      decide anything, except through `sensitive_callback`.

    Attributes:
      mechanism: what is run and accounted for.
      loss_fn: `loss_fn(params, batch)`, or `loss_fn(params, batch, key)` if
        `uses_prng_key`: the scalar loss of one example, given as a batch of one. It
        gets parameters and float inputs in the compute dtype. Arrays that it closes
        over (a frozen model) are passed to the compiled step as arguments.
      optimizer: any optax transformation; all of it is post-processing.
      policy: dtypes of parameters and of computation.
      uses_prng_key: whether the loss takes a key of its own for each example.
      loss_scale: as in `dpmp.clipped_grad`, or a `dpmp.loss_scaling.DynamicScale`: for
        float16, whose small gradients are zero without one.
    """

    mechanism: DPSGD
    loss_fn: Callable[..., jax.Array]
    optimizer: optax.GradientTransformation
    policy: Policy
    uses_prng_key: bool = False
    loss_scale: LossScale | DynamicScale | None = None

    def __post_init__(self):
        object.__setattr__(self, "loss_scale", as_number(self.loss_scale))
        if self.policy.float8_scale is not None and not _float8.is_native():
            warnings.warn(
                "float8 products are emulated on this device: rounded as they would "
                "be, and slower.",
                stacklevel=3,
            )
        if isinstance(self.loss_scale, DynamicScale):
            return
        if self.loss_scale is not None:
            loss_scaling.check(self.loss_scale)
        elif self.policy.compute_dtype == jnp.float16:
            warnings.warn(
                "float16 gradients below 6e-8 become zero, which small losses do not "
                "survive: pass loss_scale=dpmp.loss_scaling.by_loss(), or a power of "
                "two.",
                stacklevel=3,
            )

    def init(
        self, params: PyTree, *, prng_key: jax.Array | None = None
    ) -> TrainingState:
        """The state before the first step.

        Args:
          params: initial parameters, which must not depend on the private data. They
            are copied to the policy's `param_dtype`.
          prng_key: the root of all randomness of the run; None for 128 bits from the
            system. A key is for one run: with it again, on other data or with other
            hyper-parameters, the difference of the two runs would be free of noise.
            The same goes for continuing one saved state in two ways.

        Returns:
          A `TrainingState`.

        Raises:
          ValueError: for a `prng_key` that is no jax key.
        """
        if prng_key is None:
            prng_key = _random.fresh_key()
        _random.check_key(prng_key)
        noise_key, sampling_key, model_key, update_key = jax.random.split(prng_key, 4)
        params = jax.tree.map(jnp.copy, self.policy.cast_to_param(params))
        state = TrainingState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            # Copied, since a transformation may keep the parameters themselves, and
            # all arrays of the state are donated.
            opt_state=strongly_typed(
                jax.tree.map(
                    jnp.copy, self.optimizer.init(self.policy.cast_to_update(params))
                )
            ),
            noise_state=self.mechanism.privatizer(noise_key).init(params),
            sampling_key=jax.random.bits(sampling_key, (4,), jnp.uint32),
            # The default generator compiles in any program that the loss may be.
            model_key=jax.random.wrap_key_data(
                jax.random.bits(model_key, (2,), jnp.uint32), impl="threefry2x32"
            ),
            scale_state=self._step.dynamic_scale and self._step.dynamic_scale.init(),
            metrics={
                name: jnp.full((), jnp.nan, jnp.float32)
                for name in self.mechanism.metric_names
            },
            update_key=update_key if self.policy.stochastic_rounding else None,
            fingerprint=jnp.asarray(_fingerprint.fingerprint(self._facts)),
        )
        return put_together(state)

    @functools.cached_property
    def _step(self) -> Step:
        return Step(
            mechanism=self.mechanism,
            loss_fn=self.loss_fn,
            optimizer=self.optimizer,
            policy=self.policy,
            uses_prng_key=self.uses_prng_key,
            loss_scale=self.loss_scale,
        )

    @functools.cached_property
    def _programs(self) -> Programs:
        return Programs(self._step)

    @functools.cached_property
    def _facts(self) -> dict[str, str]:
        """What the claim about the steps rests on, besides their number."""
        return _fingerprint.facts_of(self.mechanism, self.policy, self.loss_scale)

    def train_step(
        self, state: TrainingState, batch: PyTree, is_padding_example: Any
    ) -> TrainingState:
        """One update, from one batch that `fit` would have drawn.

        The arrays of `state` are donated: use only the state that comes back.

        Args:
          state: the state before.
          batch: arrays with a leading axis of `mechanism.padded_batch_size`.
          is_padding_example: (padded_batch_size,) bool.

        Returns:
          The state after.

        Raises:
          ValueError: for a batch of another size, or of other shapes or dtypes than
            those before; after the last step; and for a state that `fit` would not
            continue.
        """
        _fingerprint.check(state.fingerprint, self._facts)
        _validate.require(
            int(state.step) < self.mechanism.iterations,
            f"step must be below iterations = {self.mechanism.iterations}",
            step=int(state.step),
            fix="Plan more of them before the run starts.",
        )
        return self._programs.run(state, batch, is_padding_example)[0]

    def lower(self, state: PyTree, batch: PyTree) -> Any:
        """The step as a program that can be compiled and looked at, and is not run.

        Args:
          state: a `TrainingState`, or the shapes of one (`jax.eval_shape`).
          batch: as in `train_step`, or its shapes.

        Returns:
          A `jax.stages.Lowered`.
        """
        program, constants = self._step.make_program(state, batch)
        shape = (self.mechanism.padded_batch_size,)
        is_padding = jax.ShapeDtypeStruct(shape, jnp.bool_)
        return program.lower(state, batch, is_padding, constants)

    def fit(
        self,
        state: TrainingState,
        source: PyTree | Source,
        *,
        stop_at: int | None = None,
        callback: Callable[[TrainingState], None] | None = None,
        sensitive_callback: Callable[[SensitiveOutputs], None] | None = None,
        progress: bool = True,
    ) -> TrainingState:
        """Makes the steps that are left.

        Args:
          state: from `init`, or saved from an earlier run; its arrays are donated.
          source: arrays with a leading axis of `mechanism.num_examples`, or a `Source`.
          stop_at: the step to stop at; None for `mechanism.iterations`.
          callback: is called with the state after every step. The state is donated to
            the next step: copy what is to be kept.
          sensitive_callback: is called after every step with un-noised values. What it
            sees is outside of the privacy guarantee.
          progress: whether to report step, epsilon, speed and time left.

        Returns:
          The state after `stop_at` steps.

        Raises:
          ValueError: for a dataset of another size than the mechanism accounts for;
            batches that differ in their shapes or dtypes; steps beyond the last; and a
            state whose past steps were made with another mechanism, policy or loss
            scale. Of these, `delta`, `iterations`, and how batches are cut into
            microbatches may change.
        """
        mechanism = self.mechanism
        _fingerprint.check(state.fingerprint, self._facts)
        start = int(state.step)
        stop = mechanism.iterations if stop_at is None else as_number(stop_at)
        _validate.require(
            _validate.is_integer(stop) and start <= stop <= mechanism.iterations,
            f"stop_at must be from the current step to {mechanism.iterations}",
            step=start,
            stop_at=stop,
            fix="Privacy is accounted for `iterations` steps; plan more of them before "
            "the run starts.",
        )
        source = as_source(source, mechanism.num_examples)
        key = int.from_bytes(np.asarray(state.sampling_key).tobytes(), "little")
        with self._progress(start, stop, enabled=progress) as report:
            for step in range(start, stop):
                batch, is_padding = self._load_batch(source, step, key)
                state, outputs = self._programs.run(state, batch, is_padding)
                if sensitive_callback is not None:
                    sensitive_callback(
                        SensitiveOutputs(*outputs, jnp.asarray(is_padding))
                    )
                if callback is not None:
                    callback(state)
                if report.is_due(step + 1):
                    jax.block_until_ready(state.step)
                report.update(step + 1, state.metrics)
        return state

    def _load_batch(
        self, source: Source, step: int, key: int
    ) -> tuple[PyTree, np.ndarray]:
        indices = self.mechanism.sampling.indices(
            step, num_examples=self.mechanism.num_examples, key=key
        )
        return load_batch(source, indices, self.mechanism.padded_batch_size)

    def _progress(self, start: int, stop: int, *, enabled: bool) -> Progress:
        if enabled:  # an error must come before the first step, not after it
            _describe_privacy(self.mechanism, stop, stop)
        return Progress(
            start=start,
            stop=stop,
            examples_per_step=self.mechanism.expected_batch_size,
            describe_privacy=functools.partial(_describe_privacy, self.mechanism),
            enabled=enabled,
        )


def _describe_privacy(mechanism: DPSGD, step: int, last_step: int) -> str:
    if not mechanism.is_private:
        return "no privacy"
    if mechanism.delta is None:
        return "epsilon not shown without a delta"
    spent, final = mechanism.guarantee(step), mechanism.guarantee(last_step)
    return (
        f"epsilon {accounting.round_up(spent.epsilon)} of "
        f"{accounting.round_up(final.epsilon)}"
    )
