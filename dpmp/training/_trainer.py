"""The class `DPTrainer`. `_step` and `_programs` make a step, and `_loop` the run."""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import jax
import optax

from dpmp import _processes, _validate, accounting, loss_scaling, runs
from dpmp._meshes import colocated
from dpmp._typing import PyTree
from dpmp._validate import as_number
from dpmp.loss_scaling import DynamicScale, LossScale
from dpmp.mechanism import DPSGD
from dpmp.precision import Policy
from dpmp.programs import losses
from dpmp.sources import Load, Source, check_devices, check_sharding, loader_of
from dpmp.training import _agreement, _checks
from dpmp.training._account import Account, LastStep, newest, past_of
from dpmp.training._checks import Options
from dpmp.training._loop import Loop
from dpmp.training._programs import Programs
from dpmp.training._state import Callback, SensitiveOutputs, TrainingState
from dpmp.training._step import Step
from dpmp.training._stops import Signals
from dpmp.training._tickets import (
    Batch,
    Ticket,
    check_copy,
    draw_batch,
    draw_tickets,
    root_of,
)


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
    >>> print(state.step, state.params.dtype, f"{trainer.guarantee(state).epsilon:.3f}")
    3 float32 8.000

    Guarantees:
      `guarantee(state)` covers everything in a `TrainingState`. In a private run, no
      value without noise is returned, logged or used to decide anything, except through
      `sensitive_callback`. The random bits of a step are used once, and stored nowhere,
      unless there is a `prng_key`.

    Args:
      mechanism: describes sampling, clipping and noise, and accounts for them.
      loss_fn: `loss_fn(params, batch)`, or `loss_fn(params, batch, key)` if
        `uses_prng_key`. It receives one example as a batch of one, and returns its
        scalar loss. Parameters and float inputs have the compute dtype. Arrays that the
        loss closes over (a frozen model) become arguments of the compiled step.
      optimizer: any optax transformation. It sees noisy gradients alone.
      policy: the dtypes of parameters and of computation, or the name of a preset, such
        as "mixed_bfloat16".
      uses_prng_key: whether the loss takes a key of its own for each example.
      loss_scale: for float16; see `dpmp.clipped_grad`. It may also be a
        `dpmp.loss_scaling.DynamicScale`.
      prng_key: makes runs reproducible, for tests and debugging. By default, each step
        draws its random bits from the operating system. With a key, they are a function
        of the key, the step, and how often the ledger of the directory has that step.
        Use a key for one run only: the noise of two runs with the same key cancels in
        their difference, whatever their data and hyper-parameters. The same happens if
        a state is continued in two ways. Then no privacy claim holds. A trainer with a
        key cannot be copied or pickled.

    Attributes:
      last_state: None, or the state after the last complete step of a `fit` that was
        stopped by an exception or a signal. Pass it to `fit` to go on. The next `fit`
        forgets it. All arguments except the key are read-only attributes too.

    Raises:
      ValueError: for an argument of a wrong type, or a `prng_key` that is not a jax
        key.
    """

    def __init__(
        self,
        *,
        mechanism: DPSGD,
        loss_fn: Callable[..., jax.Array],
        optimizer: optax.GradientTransformation,
        policy: Policy | str,
        uses_prng_key: bool = False,
        loss_scale: LossScale | DynamicScale | None = None,
        prng_key: jax.Array | None = None,
    ):
        self._root = root_of(prng_key)
        del prng_key  # a report of an error's variables would show it
        policy = Policy.parse(policy)
        _checks.check_types(mechanism, loss_fn, optimizer, uses_prng_key)
        losses.check_loss(loss_fn, uses_prng_key=uses_prng_key)
        loss_scale = as_number(loss_scale)
        if not isinstance(loss_scale, DynamicScale | None):
            loss_scaling.check(loss_scale)
        _checks.warn_of_policy(policy, loss_scale, loss_fn)
        self.last_state: TrainingState | None = None
        self._step = Step(
            mechanism=mechanism,
            loss_fn=loss_fn,
            optimizer=optimizer,
            policy=policy,
            uses_prng_key=uses_prng_key,
            loss_scale=loss_scale,
        )
        self._programs, self._last_step = Programs(self._step), LastStep()

    # Read-only, because the step is compiled with the mechanism that accounts for it.
    mechanism = property(lambda self: self._step.mechanism)
    loss_fn = property(lambda self: self._step.loss_fn)
    optimizer = property(lambda self: self._step.optimizer)
    policy = property(lambda self: self._step.policy)
    uses_prng_key = property(lambda self: self._step.uses_prng_key)
    loss_scale = property(lambda self: self._step.loss_scale)

    def __getstate__(self) -> dict[str, Any]:
        check_copy(self._root)
        return self.__dict__

    def init(self, params: PyTree) -> TrainingState:
        """Makes the state before the first step.

        Args:
          params: the initial parameters, which must not depend on the private data.
            They are copied to the policy's `param_dtype`, and stay on their devices.
            The state of the optimizer is sharded as they are.

        Raises:
          ValueError: if a leaf of `params` is not a float array, or not finite.
        """
        params = colocated(_checks.as_params(params))
        _checks.check_finite(params)
        state = colocated(self._step.first_state(params))
        return state._replace(spent=runs.Spent().to_array())

    def init_or_restore(
        self, params: PyTree, checkpoint_dir: str | os.PathLike[str]
    ) -> TrainingState:
        """Makes the first state, or reads the newest checkpoint if there is one.

        `fit` does this itself. Use this function to look at a run without going on. It
        finishes or removes an interrupted release, as `fit` does. The parameters say
        which arrays a checkpoint must have, and where to put them.

        Raises:
          ValueError: if all checkpoints are damaged, or if they have other arrays.
          RuntimeError: if a run is writing into the directory.
        """
        state = self.init(params)
        if not runs.checked_path(checkpoint_dir).is_dir():
            return state
        with runs.opened(checkpoint_dir) as directory:
            return newest(state, directory)[0]

    def guarantee(
        self, state: TrainingState, *, delta: float | None = None
    ) -> accounting.PrivacyGuarantee:
        """Computes epsilon of all steps that led to a state.

        They include steps of other mechanisms, and steps before the state was saved and
        loaded. Under ADD_OR_REMOVE_ONE a state does not have the number of examples,
        and all steps count with the number of the mechanism. `python -m dpmp ledger
        DIR` also counts steps that this state does not depend on. If results led to the
        decision to stop at this state, claim `mechanism.guarantee()`, of all steps.

        Args:
          state: any state of this run.
          delta: the delta; None for that of the mechanism, which must have one then.
        """
        _checks.check_state(state)
        delta = self.mechanism.delta if delta is None else delta
        delta = accounting.required_delta(delta)
        return past_of(self.mechanism, state).guarantee(delta=delta)

    def train_step(
        self, state: TrainingState, batch: PyTree, is_padding_example: Any = None
    ) -> TrainingState:
        """Makes one step with one batch, in a training loop of your own.

        The arrays of `state` are donated: afterwards, use only the returned state.

        Args:
          state: the state before the step.
          batch: the result of `load_batch` for this state, or arrays with a leading
            axis of `mechanism.padded_batch_size`. The arrays must be drawn as `fit`
            draws them, and used once.
          is_padding_example: (padded_batch_size,) bool, if `batch` is made of arrays.

        Raises:
          ValueError: for a batch of another size or step, or with other shapes or
            dtypes than earlier ones; after all iterations; inside `jax.jit` and other
            transformations.
          RuntimeError: if the batch of `load_batch` was used before.
        """
        mechanism = self.mechanism
        _checks.check_next_step(mechanism, state, batch)
        self._programs.check_structure(state)
        if not isinstance(batch, Batch):
            _agreement.check_spans_processes(batch)
            self._compare_processes(state, lambda indices: (), None)
            _agreement.check_same_arrays((batch, is_padding_example))
            ticket = self._draw_ticket(state)
            batch = Batch(batch, is_padding_example, ticket, mechanism)
        elif is_padding_example is not None:
            _validate.fail(
                "is_padding_example must be left out with a batch of load_batch, "
                "which has it. Use trainer.train_step(state, batch).",
                is_padding_example="given",
            )
        _checks.check_batch(batch, int(state.step), mechanism)
        if not _processes.all_say(self._last_step.has_returned(state)):
            _agreement.check_same_arrays(state)
        account = self._last_step.account(mechanism, state)
        with self._last_step.charging(mechanism, state):
            return self._make_step(state, batch, account)

    def _compare_processes(
        self, state: TrainingState, load: Load, sharding: Any, *plan: Any
    ) -> None:
        """Raises ValueError unless processes have the same data, key and plan."""
        digest = None if self._root is None else self._root.digest
        plan = int(state.step), *plan
        _agreement.check_same_data(load, self.mechanism, sharding, plan, digest)

    def _draw_ticket(self, state: TrainingState) -> Ticket:
        """Draws keys for the next step, which its failed attempts did not use."""
        made = past_of(self.mechanism, state) | self._last_step.failed
        _agreement.check_same_past(made)
        (ticket,) = draw_tickets([int(state.step)], self._root, made.times_made)
        return ticket

    def _make_step(
        self, state: TrainingState, batch: Batch, account: Account
    ) -> TrainingState:
        """Makes a step. If anything ends it, `charging` clears its variables."""
        new_state = self._programs.run(*self._programs.prepare(state, batch)).state
        self._last_step.remember(account, new_state)
        return new_state._replace(spent=account.spent(account.start + 1))

    def load_batch(
        self,
        state: TrainingState,
        source: PyTree | Source,
        *,
        batch_sharding: jax.sharding.Sharding | None = None,
    ) -> Batch:
        """Draws and loads a batch for the next step, for a training loop of your own.

        `fit` explains `source` and `batch_sharding`.

        Returns:
          The batch, for one call of `train_step`. It is sensitive. Its attributes
          `examples` and `is_padding_example` have NumPy arrays, or committed jax arrays
          if `batch_sharding` is given.
        """
        mechanism = self.mechanism
        _checks.check_next_step(mechanism, state)
        self._programs.check_structure(state)
        check_sharding(batch_sharding, mechanism)
        check_devices(state.params, batch_sharding)
        load = loader_of(
            source, mechanism.num_examples, hides_size=mechanism.hides_size
        )
        self._compare_processes(state, load, batch_sharding)
        ticket = self._draw_ticket(state)
        with self._last_step.charging(mechanism, state):
            return draw_batch(mechanism, load, batch_sharding, ticket)

    def lower(self, state: PyTree, batch: PyTree) -> Any:
        """Returns the program of a step, a `jax.stages.Lowered`, without running it.

        The arguments are a `TrainingState` and arrays as in `train_step`, or their
        shapes (`jax.eval_shape`).
        """
        _checks.check_is_state(state)
        return self._step.lower(state, batch)

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
            `mechanism.iterations`. If there are more already, nothing is trained, and a
            warning says so.
          batch_sharding: where to put each batch, for training on several devices: a
            `jax.sharding.Sharding` of the leading axis. Each device clips and sums its
            own examples, and each process loads only the examples of its own devices.
            Padded batch size and microbatch size must be multiples of the number of
            parts. None leaves the choice to jax.
          callback: a function that is called with every state that is released: after
            every step, or with every checkpoint if there is a directory. The state is
            donated to the next step: copy the arrays that you want to keep. To have
            numbers shown and recorded, return a dict of them. They must come from
            public data or from released values.
          sensitive_callback: a function that is called with values without noise after
            every step. The privacy guarantee does not cover these values.
          progress: whether to show method, epsilon, noisy metrics, speed and time left
            (on the first of several processes).
          checkpoint_dir: a directory for checkpoints, privacy ledger and metrics (see
            the guide "Long runs"). Steps are released when their checkpoint is on the
            disk. Before, they cost nothing unless an error or a callback may show them.
            If it has a checkpoint of more steps than `state`, the run goes on from it.
          every: the number of steps between two checkpoints.
          keep: the number of newest checkpoints to keep.
          epsilon_budget: the largest epsilon that all runs in `checkpoint_dir` may
            reach together. The run stops before a step that would exceed it. The guide
            "Guarantees" says what you may choose by looking at results.
          prefetch: how many batches are loaded ahead by a thread in the background. 0
            loads them in the calling thread, for a source that needs it.

        Returns:
          The state after `stop_at` steps.

        Raises:
          ValueError: for a dataset of another size than the mechanism's or the past
            steps', batches with different shapes or dtypes, `stop_at` out of range, a
            `batch_sharding` that cannot divide batches (or none, with several
            processes), processes with different data, states, keys, options or
            programs, or damaged files.
          RuntimeError: if another run uses the directory, or if the source raises an
            exception. The error does not name the record; `dpmp.check_source` does.
          OSError: if a file of the run cannot be written.
          Exception: whatever a callback raises, and KeyboardInterrupt. The state after
            the last complete step is then in `last_state`, as it is if the source
            fails.
        """
        mechanism = self.mechanism
        options = Options(
            mechanism=mechanism,
            stop=_checks.checked_stop(stop_at, state, mechanism.iterations),
            batch_sharding=batch_sharding,
            callback=callback,
            sensitive_callback=sensitive_callback,
            progress=progress,
            checkpoint_dir=checkpoint_dir,
            every=every,
            keep=keep,
            epsilon_budget=epsilon_budget,
            prefetch=prefetch,
        )
        load = loader_of(
            source, mechanism.num_examples, hides_size=mechanism.hides_size
        )
        self._programs.check_structure(state)
        check_devices(state.params, batch_sharding)
        self._compare_processes(state, load, batch_sharding, options.plan)
        _agreement.check_same_arrays(state)
        made: Any = None
        failure, opened = None, contextlib.nullcontext()
        if checkpoint_dir is not None:
            opened = runs.opened(checkpoint_dir, delta=mechanism.delta)
        with (
            opened as directory,
            Signals(sigterm=directory is not None) as signals,
        ):
            loop = Loop(
                self._programs,
                state,
                load,
                options,
                directory,
                signals,
                self._root,
                self._last_step,
            )
            self.last_state = None
            try:
                loop.run()
                # A signal may come before the return.
                made = self.last_state = loop.state
            except BaseException as error:
                try:
                    made = self.last_state = loop.stopped(error)
                except Exception as cause:  # nobody may see a step that is not paid for
                    kind = OSError if isinstance(cause, OSError) else RuntimeError
                    failure = kind(f"{cause} The run has stopped.")
                except BaseException:  # from a signal handler of the program itself
                    failure = KeyboardInterrupt()
                if failure is None:
                    raise
            finally:
                loop.settle(made)
            if failure is not None:  # raised here, it does not show the first error
                del loop  # nor the state
                raise failure
        loop.end()
        self.last_state = None
        return made  # a call here could be interrupted
