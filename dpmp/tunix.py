"""Private trainers of Tunix: `private(PeftTrainer)` and `private(DPOTrainer)`.

A private trainer is used as Tunix's own. dpmp draws the batches, clips, adds noise,
accounts for epsilon and saves the checkpoints. Tunix has the model, the loss, the
evaluation on public data, the loggers and the hooks; only released numbers reach them.

Import it by `import dpmp.tunix`. It needs `pip install google-tunix`.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.interpreters import pxla
from orbax.checkpoint import CheckpointManagerOptions

from dpmp import _validate
from dpmp.accounting import PrivacyGuarantee
from dpmp.mechanism import DPSGD
from dpmp.precision import Policy
from dpmp.training import DPTrainer, TrainingState, check_copy, root_of

try:
    from flax import nnx
    from tunix.sft import peft_trainer
except ImportError as error:
    raise ImportError(
        "dpmp.tunix needs Tunix. Run: pip install google-tunix"
    ) from error

__all__ = ["PrivateTrainer", "private"]

# Methods of Tunix that see values without noise.
_REPLACED = ("train", "_train_step", "create_train_step_fn", "jit_train_and_eval_step")
_MODEL_INPUTS = (
    "Call trainer.with_gen_model_input_fn with a function from an example to a dict of "
    "the arguments of the loss."
)
# Options that a private trainer does not have, with the way out.
_REFUSED = {
    "gradient_accumulation_steps": "A step must be one batch, for which the noise is "
    "calibrated. To save memory, set microbatch_size of dpmp.DPSGD.",
    "max_seq_token_per_tpu": "A packed sequence joins examples, which must be clipped "
    "one by one. Pad each example to one length.",
    "profiler_options": "Use jax.profiler.trace around `train`.",
    "perf_metrics_options": "Use jax.profiler.trace around `train`.",
    "perf_tracer": "Use jax.profiler.trace around `train`.",
    "perf_tracer_v2": "Use jax.profiler.trace around `train`.",
}


def private(trainer: type[peft_trainer.PeftTrainer]) -> "type[PrivateTrainer]":
    """Makes a class of private trainers.

    Their constructor takes the arguments of Tunix's, and these by name:

    - `mechanism`: the `dpmp.DPSGD` that describes sampling, clipping and noise. Its
      `num_examples` is the number of rows of the data, and its `iterations` the number
      of steps.
    - `policy`: the precision (see `dpmp.DPTrainer`). None follows the trained
      parameters: "float32", or "mixed_bfloat16" for bfloat16.
    - `prng_key`: makes runs reproducible, for tests (see `dpmp.DPTrainer`).

    Args:
      trainer: `PeftTrainer`, `DPOTrainer` (also for ORPO), or a subclass that does not
        override `train` and the steps.

    Raises:
      TypeError: for another class.
    """
    base = peft_trainer.PeftTrainer
    if not (isinstance(trainer, type) and issubclass(trainer, base)):
        _validate.fail(
            "private needs a trainer of Tunix. Use private(PeftTrainer), for example.",
            error=TypeError,
        )
    changed = [x for x in _REPLACED if getattr(trainer, x) is not getattr(base, x)]
    if changed:
        _validate.fail(
            "the trainer must make its steps as Tunix does, because a private trainer "
            "makes its own in their place. Choose the loss by `with_loss_fn`.",
            overridden=changed,
            error=TypeError,
        )
    return type(f"Private{trainer.__name__}", (PrivateTrainer, trainer), {})


class PrivateTrainer(peft_trainer.PeftTrainer):
    """What the classes that `private` makes have in common.

    Guarantees:
      Epsilon of `guarantee()` covers `model`, the checkpoints, and every number that
      reaches the metrics logger or the training hooks, except those of `eval_ds`.

    Attributes:
      state: the `dpmp.TrainingState` after the last released step, with the float32
        masters of the trained parameters; None before `train`.

    Raises:
      ValueError: for options that would break the guarantee, or that dpmp does not
        have: accumulation of gradients, packed sequences, another number of steps than
        the mechanism's, fields of `checkpointing_options` other than
        `save_interval_steps` and `max_to_keep`, profilers.
    """

    def __init__(
        self,
        *args: Any,
        mechanism: DPSGD,
        policy: Policy | str | None = None,
        prng_key: jax.Array | None = None,
        **kwargs: Any,
    ):
        self._root: Any = root_of(prng_key)
        del prng_key  # a report of an error's variables would show it
        bound = inspect.signature(super().__init__).bind(*args, **kwargs)
        given, config = bound.arguments, bound.arguments["training_config"]
        _validate.instance(DPSGD, "Use dpmp.DPSGD(...).calibrate.", mechanism=mechanism)
        _check_options(config, given, mechanism)
        self._fit_options = _checkpoint_options(config)
        self._private: DPTrainer | None = None
        self._wanted = mechanism, given["optimizer"], policy
        # Tunix's own optimizer has no state, and its checkpoints no directory.
        given["optimizer"] = optax.identity()
        given["training_config"] = dataclasses.replace(
            config, checkpoint_root_directory=None, checkpointing_options=None
        )
        super().__init__(*bound.args, **bound.kwargs)
        self.state: TrainingState | None = None

    def __getstate__(self) -> dict[str, Any]:
        check_copy(self._root)
        return self.__dict__

    def clear_jit_cache(self) -> None:
        """Refuses another loss after the first step; see Tunix."""
        if self._private is not None:
            _validate.fail(
                "the loss must be chosen before the first `train`. Make another "
                "trainer, whose run has an epsilon of its own."
            )
        super().clear_jit_cache()

    def _train_step(self, model: Any, optimizer: Any, inputs: Any) -> NoReturn:
        del model, optimizer, inputs
        _validate.fail("a private trainer makes its steps in `train`. Call that.")

    def train(
        self,
        train_ds: Any,
        eval_ds: Any = None,
        skip_jit: bool = False,
        *,
        cache_nnx_graph: bool = True,
        progress: bool = True,
    ) -> None:
        """Makes the steps of the mechanism, or those that are left of them.

        The model, as it is at the first call, must not depend on the private data. With
        `checkpoint_root_directory`, a program that is started again goes on, and
        releases steps by checkpoints; see the guide "Long runs".

        Noisy metrics (`released_metrics` of the mechanism) are logged in place of
        Tunix's loss, perplexity and gradient norm. `on_train_step_end` of the hooks is
        called with each release, with the noisy loss, or NaN if none is released.

        Args:
          train_ds: all private examples, not batches: a tree of arrays, such as a
            `TrainingInput`, with one row for each example, or anything with `__len__`
            and `__getitem__` that returns one example (a grain dataset before `batch`).
            For `DPOTrainer`, an example is a pair of tokenized answers.
          eval_ds: batches of public examples, for Tunix's own evaluation.
          skip_jit: whether to evaluate without compilation; steps are compiled anyway.
          cache_nnx_graph: see Tunix; for the evaluation.
          progress: whether dpmp shows epsilon, speed and the noisy metrics.

        Raises:
          ValueError: see `dpmp.DPTrainer.fit`. Also for a model that remembers earlier
            batches, and for trained parameters of several dtypes without a `policy`.
        """
        if self.data_hooks is not None or self.is_managed_externally:
            _validate.fail(
                "batches must be drawn by the sampler that the accountant knows. Pass "
                "all examples to `train`, without data hooks."
            )
        if isinstance(train_ds, list | tuple):
            _validate.fail(
                "train_ds must be arrays with a row for each example, because a list "
                "could be one of batches. Join a list of examples by "
                "jax.tree.map(lambda *rows: np.stack(rows), *examples).",
                type=type(train_ds).__name__,
            )
        one_batch = Mapping | np.ndarray | jax.Array
        if eval_ds is not None and (
            not isinstance(eval_ds, Iterable) or isinstance(eval_ds, one_batch)
        ):
            _validate.fail(
                "eval_ds must be batches of public examples. Pass [batch] for one "
                "batch.",
                type=type(eval_ds).__name__,
            )
        if eval_ds:
            _validate.positive_integer(
                eval_every_n_steps=self.config.eval_every_n_steps,
                fix="Choose it in the training_config.",
            )
        if self._private is None:
            self._private = self._make_trainer()
        state = self._state_to_train()
        if state.step > 0:
            self.state = state
        self._update_model(state)
        steps: Any = self.jit_train_and_eval_step(skip_jit, cache_nnx_graph)

        evaluate = None
        if eval_ds:
            evaluate = functools.partial(self._run_eval, eval_ds, steps[1])
            evaluate()
        if self.training_hooks:
            self.training_hooks.on_train_start(self)
        try:
            self.state = self._private.fit(
                state,
                train_ds,
                batch_sharding=self._batch_sharding(),
                callback=lambda state: self._show(state, evaluate),
                progress=progress,
                **self._fit_options,
            )
        finally:
            self.state = self._private.last_state or self.state
            if self.state is not None and not _is_donated(self.state):
                self._update_model(self.state)
        if self.training_hooks:
            self.training_hooks.on_train_end(self)
        self.close()

    def _state_to_train(self) -> TrainingState:
        """The last state. A lost one can come back from a checkpoint alone."""
        assert self._private is not None
        directory = self._fit_options["checkpoint_dir"]
        if self.state is not None and not _is_donated(self.state):
            return self.state
        if directory is None:
            state = self._private.init(self._params())
        else:
            state = self._private.init_or_restore(self._params(), directory)
        # A first state would not count the steps that the model already has.
        if self.state is not None and int(state.step) < self._train_steps:
            _validate.fail(
                "the state must have survived the last error; its step has lost it. "
                "The model has the parameters of the last release, with the epsilon "
                "of `guarantee`. With checkpoint_root_directory, a run goes on from "
                "its last checkpoint.",
                error=RuntimeError,
            )
        return state

    def guarantee(self, *, delta: float | None = None) -> PrivacyGuarantee:
        """Epsilon of all steps that led to `model`; see `DPTrainer.guarantee`.

        It may be called in the hooks.
        """
        if self._private is None or self.state is None:
            _validate.fail("there must be a state. Call `train` first.")
        state = self.state
        if _is_donated(state):  # `spent`, which says what it cost, is on the host
            zero = np.zeros((), np.int32)
            state = jax.tree.map(
                lambda x: zero if isinstance(x, jax.Array) else x, state
            )
        return self._private.guarantee(state, delta=delta)

    def _show(self, state: TrainingState, evaluate: Callable[[], None] | None) -> None:
        """Shows released numbers to Tunix's loggers, evaluation and hooks."""
        before, self.state = self._train_steps, state
        self._update_model(state)
        numbers = {name: float(x) for name, x in (state.metrics or {}).items()}
        name = "learning_rate"
        found = optax.tree_utils.tree_get_all_with_path(state.opt_state, name)
        rates = [(name, float(x)) for _, x in found[:1]]
        logger: Any = self.metrics_logger
        for name, x in [*numbers.items(), *rates]:
            logger.log(self.metrics_prefix, name, x, self._mode, self._train_steps)
        every = self.config.eval_every_n_steps
        if evaluate and before // every < self._train_steps // every:
            evaluate()
        if self.training_hooks:
            loss = numbers.get("loss", np.nan)
            self.training_hooks.on_train_step_end(self, self._train_steps, loss)

    def _params(self) -> Any:
        return nnx.state(self.model, self._trained)

    @property
    def _trained(self) -> type[nnx.Variable]:
        return nnx.LoRAParam if self._lora_enabled else nnx.Param

    def _update_model(self, state: TrainingState) -> None:
        """Copies released parameters into the model, in its own dtypes."""
        self._train_steps = int(state.step)

        def copied(x: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.array(x, old.dtype)  # a state is donated to the next step

        nnx.update(self.model, jax.tree.map(copied, state.params, self._params()))

    def _make_trainer(self) -> DPTrainer:
        mechanism, optimizer, policy = self._wanted
        graph, params, rest = nnx.split(self.model, self._trained, ...)
        if any(x is self.model for name, x in vars(self).items() if name != "model"):
            _validate.fail(
                "the reference model must be another object than the model, which is "
                "trained. Use nnx.clone(model)."
            )
        others = {  # such as the reference of DPO
            name: nnx.split(x)
            for name, x in vars(self).items()
            if isinstance(x, nnx.Module) and x is not self.model
        }
        loss_fn: Any = self.loss_fn
        streams = {x.tag for x in _variables(nnx.state(self.model, nnx.RngKey))}

        def loss_of_one(params: Any, example: Any, key: Any) -> jax.Array:
            # A trace may change copies alone, and each example needs its own streams.
            model = nnx.merge(graph, params, rest, copy=True)
            keys: dict[str, Any] = dict.fromkeys(streams, key)
            # Layers that are stacked have a stack of keys.
            nnx.reseed(model, policy="match_shape", **keys)
            before = _remembered(model)
            copies = {name: nnx.merge(*x, copy=True) for name, x in others.items()}
            with self._attributes(model=model, **copies), _without_mesh():
                inputs: Any = self.gen_model_input_fn(self._prepare_inputs(example))
                _validate.instance(Mapping, _MODEL_INPUTS, inputs_of_the_loss=inputs)
                output: Any = loss_fn(model, **inputs)
            _check_memory(before, _remembered(model))
            return output[0] if self._has_aux else output  # no metrics: they are exact

        def loss_without_key(params: Any, example: Any) -> jax.Array:
            return loss_of_one(params, example, None)

        return DPTrainer(
            mechanism=mechanism,
            loss_fn=loss_of_one if streams else loss_without_key,
            optimizer=optimizer,
            policy=_policy_of(params) if policy is None else policy,
            uses_prng_key=bool(streams),
            prng_key=self._root,
        )

    @contextlib.contextmanager
    def _attributes(self, **values: Any) -> Iterator[None]:
        """Replaces attributes while a loss is traced."""
        before = {name: vars(self)[name] for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)

    def _batch_sharding(self) -> jax.sharding.Sharding | None:
        mesh = pxla.thread_resources.env.physical_mesh  # the one that Tunix uses
        axes = self.config.data_sharding_axis
        if mesh.empty:
            return None
        if not {*jax.tree.leaves(axes)} <= {*mesh.axis_names}:
            _validate.fail(
                "data_sharding_axis must name axes of the mesh. Choose them in the "
                "training_config.",
                data_sharding_axis=axes,
                mesh_axes=mesh.axis_names,
            )
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))


def _without_mesh() -> contextlib.AbstractContextManager[Any]:
    """Hides the mesh: Tunix's models would shard the axis of a batch of one."""
    if pxla.thread_resources.env.physical_mesh.empty:
        return contextlib.nullcontext()
    return jax.sharding.Mesh(np.empty((), object), ())


def _is_donated(state: TrainingState) -> bool:
    """Whether a step has taken the arrays of a state, and returned no other state."""
    return any(x.is_deleted() for x in jax.tree.leaves(state.params))


def _variables(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def _remembered(model: Any) -> dict[str, Any]:
    """The arrays of a model that are neither parameters nor random, by their paths."""
    state = nnx.state(model, nnx.Not(nnx.Any(nnx.Param, nnx.RngState)))
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): x for path, x in leaves}


def _check_memory(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raises ValueError for a model that remembers earlier batches."""
    changed = [
        name
        for name, x in before.items()
        if after.get(name) is not x or isinstance(x, jax.Ref)
    ]
    if changed:
        _validate.fail(
            "a model must not remember earlier batches: that memory would not be "
            "private, and it stays as it was. Use layers without averages over "
            "batches, and scales that are computed anew (no act_static_scale of qwix). "
            "Remove caches and intermediates of earlier calls by nnx.pop. A variable "
            "that passes through nnx.jit or nnx.remat counts as changed: keep it out.",
            changed=changed,
        )


def _check_options(config: Any, given: dict[str, Any], mechanism: DPSGD) -> None:
    """Raises ValueError for options that a private trainer does not have."""
    for name, fix in _REFUSED.items():
        value = getattr(config, name, None) or given.get(name)
        if value not in (None, 1):
            _validate.fail(f"{name} must be left out of a private trainer. {fix}")
    if config.max_steps not in (None, mechanism.iterations):
        _validate.fail(
            "max_steps must be the iterations of the mechanism, for which the noise "
            "is calibrated. Leave it out.",
            max_steps=config.max_steps,
            iterations=mechanism.iterations,
        )


def _checkpoint_options(config: Any) -> dict[str, Any]:
    """The arguments of `DPTrainer.fit` for Tunix's options of checkpoints."""
    options = config.checkpointing_options or CheckpointManagerOptions(100, 3)
    rest = dataclasses.replace(options, save_interval_steps=1, max_to_keep=None)
    if rest != CheckpointManagerOptions():
        _validate.fail(
            "checkpointing_options must be orbax's CheckpointManagerOptions with "
            "save_interval_steps and max_to_keep alone, because dpmp saves "
            "checkpoints, which release the steps"
        )
    if not config.checkpoint_root_directory and config.checkpointing_options:
        _validate.fail(
            "checkpointing_options must come with a checkpoint_root_directory. Name "
            "one, or leave the options out: without a directory, nothing is saved."
        )
    kept = {} if options.max_to_keep is None else {"keep": options.max_to_keep}
    directory = config.checkpoint_root_directory
    return {"checkpoint_dir": directory, "every": options.save_interval_steps, **kept}


def _policy_of(params: Any) -> str:
    dtypes = {x.dtype.name for x in jax.tree.leaves(params)}
    presets = {"float32": "float32", "bfloat16": "mixed_bfloat16"}
    if not (len(dtypes) == 1 and dtypes <= presets.keys()):
        _validate.fail(
            "the trained parameters must be all float32 or all bfloat16, unless there "
            'is a policy. Use policy="mixed_bfloat16", for example.',
            dtypes=sorted(dtypes),
        )
    return presets[dtypes.pop()]
