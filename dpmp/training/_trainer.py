"""DPTrainer: the host samples and loads batches, and runs the loop of steps."""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpmp import _validate, loss_scaling
from dpmp._numbers import as_number
from dpmp._typing import PyTree
from dpmp.loss_scaling import DynamicScale, LossScale
from dpmp.mechanism import DPSGD
from dpmp.precision import Policy
from dpmp.training import _fingerprint
from dpmp.training._batches import Batches, sampling_key
from dpmp.training._checks import (
    as_params,
    check_loss,
    check_options,
    check_state,
    check_types,
    checked_stop,
    warn_of_directory,
    warn_of_policy,
)
from dpmp.training._keys import RunKeys
from dpmp.training._loop import Loop
from dpmp.training._placed import check_sharding
from dpmp.training._report import report_on
from dpmp.training._run_files import restore, run_files
from dpmp.training._settled import put_together
from dpmp.training._source import Source, loader_of
from dpmp.training._state import Callback, SensitiveOutputs, TrainingState
from dpmp.training._step import Step
from dpmp.training._stopped import kept


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPTrainer:
    """Trains a model with the mechanism that also accounts for the privacy cost.

    >>> mechanism = DPSGD(
    ...     num_examples=64, expected_batch_size=16, iterations=3, l2_clip_norm=1.0
    ... ).calibrate(epsilon=8.0, delta=1e-5)
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
      `mechanism.guarantee(step)` covers `TrainingState.params` and `.opt_state` after
      any number of steps. No value without noise is returned, logged or used to decide
      anything, except through `sensitive_callback`.

    Attributes:
      mechanism: describes sampling, clipping and noise, and accounts for them.
      loss_fn: `loss_fn(params, batch)`, or `loss_fn(params, batch, key)` if
        `uses_prng_key`. It returns the scalar loss of one example, which it is given as
        a batch of one. Parameters and float inputs have the compute dtype. Arrays that
        it closes over (a frozen model) are passed to the compiled step as arguments.
      optimizer: any optax transformation. It sees noisy gradients alone.
      policy: the dtypes of parameters and of computation, or the name of a preset, such
        as "mixed_bfloat16".
      uses_prng_key: whether the loss takes a key of its own for each example.
      loss_scale: for float16; see `dpmp.clipped_grad`. It may also be a
        `dpmp.loss_scaling.DynamicScale`.
      last_state: None, or the state after the last complete step of a `fit` that was
        stopped by an exception or by Ctrl-C. Hand it to `fit` to go on. The next `fit`
        forgets it.
    """

    mechanism: DPSGD
    loss_fn: Callable[..., jax.Array]
    optimizer: optax.GradientTransformation
    policy: Policy | str
    uses_prng_key: bool = False
    loss_scale: LossScale | DynamicScale | None = None
    last_state: TrainingState | None = dataclasses.field(
        default=None, init=False, repr=False, compare=False
    )
    _restored: Any = dataclasses.field(  # the sampling key and the directory
        default=None, init=False, repr=False, compare=False
    )

    def __post_init__(self):
        object.__setattr__(self, "policy", Policy.parse(self.policy))
        check_types(mechanism=self.mechanism, optimizer=self.optimizer)
        check_loss(self.loss_fn, uses_prng_key=self.uses_prng_key)
        object.__setattr__(self, "loss_scale", as_number(self.loss_scale))
        warn_of_policy(self._policy, self.loss_scale)
        if not isinstance(self.loss_scale, DynamicScale | None):
            loss_scaling.check(self.loss_scale)

    def init(
        self, params: PyTree, *, prng_key: jax.Array | None = None
    ) -> TrainingState:
        """Makes the state before the first step.

        Args:
          params: the initial parameters, which must not depend on the private data.
            They are copied to the policy's `param_dtype`, and stay on their devices.
            The state of the optimizer is sharded as they are.
          prng_key: the root of all random numbers of the run. None draws 128 bits from
            the operating system, on the first of several processes. Use a key for one
            run only: the noise of two runs with the same key cancels in their
            difference, whatever their data and hyper-parameters. So it does if a saved
            state is continued in two ways.

        Raises:
          ValueError: if `prng_key` is not a jax key or is not the same on all
            processes, or if a leaf of `params` is not a float array.
        """
        params = as_params(params)
        keys = RunKeys.from_root(prng_key)
        state = self._step.first_state(params, keys)
        hashes = _fingerprint.fingerprint(self._facts, keys.sampling)
        return put_together(state._replace(fingerprint=hashes))

    def init_or_restore(
        self,
        params: PyTree,
        checkpoint_dir: str | os.PathLike[str],
        *,
        prng_key: jax.Array | None = None,
    ) -> TrainingState:
        """Makes the first state, or reads the newest checkpoint if there is one.

        Args:
          params: the initial parameters. They say which arrays a checkpoint must have,
            and where to put them.
          checkpoint_dir: the directory that `fit` saves to.
          prng_key: see `init`.

        Raises:
          ValueError: if all checkpoints are damaged, or if they have other arrays.
        """
        state = restore(checkpoint_dir, self.init(params, prng_key=prng_key))
        self._check_state(state)
        object.__setattr__(self, "_restored", (sampling_key(state), checkpoint_dir))
        return state

    @property
    def _policy(self) -> Policy:
        assert isinstance(self.policy, Policy)  # since __post_init__
        return self.policy

    @functools.cached_property
    def _step(self) -> Step:
        return Step(
            mechanism=self.mechanism,
            loss_fn=self.loss_fn,
            optimizer=self.optimizer,
            policy=self._policy,
            uses_prng_key=self.uses_prng_key,
            loss_scale=self.loss_scale,
        )

    @functools.cached_property
    def _facts(self) -> dict[str, str]:
        return _fingerprint.facts_of(self.mechanism, self._policy, self.loss_scale)

    def train_step(
        self, state: TrainingState, batch: PyTree, is_padding_example: Any
    ) -> TrainingState:
        """Makes one step with one batch, which must be drawn as `fit` draws it.

        The arrays of `state` are donated: afterwards, use only the returned state.

        Args:
          state: the state before the step.
          batch: arrays with a leading axis of `mechanism.padded_batch_size`.
          is_padding_example: (padded_batch_size,) bool.

        Raises:
          ValueError: if the batch has another size, or other shapes or dtypes than
            earlier batches; if all iterations are done; or if `fit` would refuse to
            continue the state.
        """
        self._check_state(state)
        _validate.require(
            int(state.step) < self.mechanism.iterations,
            f"step must be below iterations = {self.mechanism.iterations}",
            step=int(state.step),
            fix="Plan more iterations before the run starts.",
        )
        return self._step.run(state, batch, is_padding_example)[0]

    def load_batch(
        self,
        state: TrainingState,
        source: PyTree | Source,
        *,
        batch_sharding: jax.sharding.Sharding | None = None,
    ) -> tuple[PyTree, Any]:
        """Draws and loads the batch of the next step, for a training loop of your own.

        Args:
          state: the state before the step. It decides which examples are drawn.
          source: the dataset; see `fit`.
          batch_sharding: where to put the batch; see `fit`.

        Returns:
          The batch and `is_padding_example`, the arguments of `train_step`. Both are
          sensitive. They are NumPy arrays, or placed arrays with `batch_sharding`.
        """
        self._check_state(state)
        check_sharding(batch_sharding, self.mechanism)
        load = loader_of(source, self.mechanism.num_examples)
        batches = Batches(self.mechanism, load, sampling_key(state), batch_sharding)
        return batches.draw(int(state.step))

    def _check_state(self, state: Any) -> None:
        check_state(state)
        _fingerprint.check(state.fingerprint, self._facts, state.sampling_key)

    def lower(self, state: PyTree, batch: PyTree) -> Any:
        """Returns the program of a step, a `jax.stages.Lowered`, without running it.

        Args:
          state: a `TrainingState`, or its shapes (`jax.eval_shape`).
          batch: a batch as in `train_step`, or its shapes.
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
        batch_sharding: jax.sharding.Sharding | None = None,
        callback: Callback | None = None,
        sensitive_callback: Callable[[SensitiveOutputs], None] | None = None,
        progress: bool = True,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        every: int = 100,
        keep: int = 3,
        epsilon_budget: float | None = None,
        prefetch: int = 2,
    ) -> TrainingState:
        """Makes all remaining steps of the run, or those up to `stop_at`.

        Args:
          state: a state from `init`, or a saved one. Its arrays are donated:
            afterwards, use only the returned state.
          source: arrays with a leading axis of `mechanism.num_examples`, a table of
            pandas, a dict of lists, or a `Source`.
          stop_at: the number of steps after which to stop; None for
            `mechanism.iterations`.
          batch_sharding: where to put each batch, for training on several devices: a
            `jax.sharding.Sharding` of the leading axis. Each device clips and sums its
            own examples, and each process loads only those of its own devices. Padded
            batch size and microbatch size must be multiples of the number of parts.
            None leaves it to jax.
          callback: a function that is called with the state after every step. The state
            is donated to the next step: copy the arrays that you want to keep. To have
            numbers shown and recorded, return a dict of them. They must come from
            public data or from released values.
          sensitive_callback: a function that is called with values without noise after
            every step. The privacy guarantee does not cover these values.
          progress: whether to show method, epsilon, noisy metrics, speed and time left
            (on the first of several processes).
          checkpoint_dir: a directory for checkpoints, privacy ledger and metrics. If it
            has a checkpoint with more steps than `state`, the run goes on from there
            (see the guide "Long runs").
          every: the number of steps between two checkpoints.
          keep: the number of newest checkpoints to keep.
          epsilon_budget: the largest epsilon that all runs in `checkpoint_dir` may
            reach together. The run stops before a step that would exceed it.
          prefetch: how many batches are loaded ahead by a thread in the background. 0
            loads them in the calling thread, for a source that needs it.

        Returns:
          The state after `stop_at` steps.

        Raises:
          ValueError: for a dataset of another size than the mechanism's, batches with
            different shapes or dtypes, `stop_at` out of range, a `batch_sharding` that
            cannot divide batches (or none, with several processes), or past steps with
            another mechanism, policy, loss scale, key or dataset. Only `delta`,
            `iterations` and the division into microbatches may change during a run.
          RuntimeError: if the source raises an exception. It does not say for which
            record; `dpmp.check_source` does.
          Exception: whatever a callback raises, and KeyboardInterrupt. The state after
            the last complete step is then in `last_state`, as it is if the source
            fails.
        """
        mechanism = self.mechanism
        self._check_state(state)
        stop = checked_stop(stop_at, int(state.step), mechanism.iterations)
        check_options(callback, sensitive_callback, prefetch)
        check_sharding(batch_sharding, mechanism)
        load = loader_of(source, mechanism.num_examples)

        def batches_of(state: TrainingState) -> Batches:
            return Batches(mechanism, load, sampling_key(state), batch_sharding)

        if checkpoint_dir is None:
            warn_of_directory(state, self._restored)
        object.__setattr__(self, "last_state", None)
        loop = None
        try:
            with run_files(
                checkpoint_dir,
                state,
                stop,
                mechanism=mechanism,
                load=load,
                describe_program=lambda state: self._step.describe(
                    state, *batches_of(state).empty()
                ),
                check_state=self._check_state,
                every=every,
                keep=keep,
                epsilon_budget=epsilon_budget,
            ) as files:
                loop = Loop(
                    state=files.state,
                    stop=files.stop,
                    step=self._step,
                    batches=batches_of(files.state),
                    prefetch=prefetch,
                    files=files,
                    report=report_on(self._step, files, load, enabled=progress),
                    callback=callback,
                    sensitive_callback=sensitive_callback,
                )
                loop.run()
            loop.report.end()
        except BaseException as error:
            if loop is not None:
                last_state = kept(mechanism, loop.files.epsilon, loop.state, error)
                object.__setattr__(self, "last_state", last_state)
            raise
        return loop.state
