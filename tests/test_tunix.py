"""Private trainers of Tunix, next to Tunix's own."""

import copy
import dataclasses
import functools
import logging
import pickle
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dpmp
from dpmp.runs._ledger import Ledger

pytest.importorskip("tunix", reason="pip install '.[tunix]'")

with warnings.catch_warnings(action="ignore"):  # of what Tunix imports
    import qwix
    from orbax.checkpoint import CheckpointManagerOptions
    from tunix.models.gemma3 import model as gemma3
    from tunix.models.llama3 import model as llama3
    from tunix.sft import hooks, utils
    from tunix.sft.dpo.dpo_trainer import (
        DPOTrainer,
        DPOTrainingConfig,
    )
    from tunix.sft.dpo.dpo_trainer import TrainingInput as Pairs
    from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput

    from dpmp.tunix import private

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


@pytest.fixture(autouse=True)
def _promotion_of_models():
    with jax.numpy_dtype_promotion("standard"):
        yield


VOCABULARY, LENGTH, SIZE, STEPS = 64, 12, 8, 3
SHAPE = {
    "num_layers": 1,
    "embed_dim": 32,
    "hidden_dim": 64,
    "num_heads": 4,
    "head_dim": 8,
    "num_kv_heads": 2,
}
MODELS = {
    "llama3": lambda rngs: llama3.Llama3(
        llama3.ModelConfig(
            **SHAPE, vocab_size=VOCABULARY, rope_theta=10_000, norm_eps=1e-5
        ),
        rngs=rngs,
    ),
    "gemma3": lambda rngs: gemma3.Gemma3(
        gemma3.ModelConfig(
            **SHAPE,
            num_embed=VOCABULARY,
            sliding_window_size=8,
            param_dtype=jnp.float32,
        ),
        rngs=rngs,
    ),
}
RNG = np.random.default_rng(0)


def ids(size, length):
    return RNG.integers(1, VOCABULARY, (size, length)).astype(np.int32)


DATA = TrainingInput(ids(SIZE, LENGTH), np.ones((SIZE, LENGTH), bool))
PAIRS = Pairs(
    prompt_ids=ids(SIZE, 6),
    prompt_mask=np.tile(np.int32([0, 0, 1, 1, 1, 1]), (SIZE, 1)),
    chosen_ids=ids(SIZE, 5),
    chosen_mask=(np.arange(5) < 3 + np.arange(SIZE)[:, None] % 3).astype(np.int32),
    rejected_ids=ids(SIZE, 5),
    rejected_mask=np.ones((SIZE, 5), np.int32),
)
MECHANISM = dpmp.DPSGD(
    num_examples=SIZE,
    expected_batch_size=SIZE,
    truncated_batch_size=SIZE,
    iterations=STEPS,
    l2_clip_norm=1.0,
    noise_multiplier=1.0,
    delta=1e-3,
)
NOT_PRIVATE = MECHANISM.without_privacy()


def inputs_of(x):
    return {
        "input_tokens": x.input_tokens,
        "input_mask": x.input_mask,
        "positions": utils.build_positions_from_mask(x.input_mask),
        "attention_mask": utils.make_causal_attn_mask(x.input_mask),
    }


def make(name, kind="full"):
    model = MODELS[name](nnx.Rngs(0))
    if kind == "full":
        return model
    quantised = {"weight_qtype": kind, "tile_size": None} if kind != "lora" else {}
    paths = ".*(q|k|v|kv|gate|up|down)_proj"
    provider = qwix.LoraProvider(module_path=paths, rank=4, alpha=8.0, **quantised)
    inputs = model.get_model_input()
    model = qwix.apply_lora_to_model(model, provider, **inputs, rngs=nnx.Rngs(1))
    adapters = nnx.state(model, nnx.LoRAParam)
    noise = jax.random.normal
    moved = jax.tree.map(lambda x: x + 0.05 * noise(nnx.Rngs(2)(), x.shape), adapters)
    nnx.update(model, moved)
    return model


class WithDropout(nnx.Module):
    def __init__(self):
        self.embed = nnx.Embed(VOCABULARY, VOCABULARY, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=1))

    def __call__(self, tokens, *_):
        return self.dropout(self.embed(tokens)), None


def config(**fields):
    return TrainingConfig(**{"eval_every_n_steps": 100} | fields)


def make_trainer(model, mechanism=MECHANISM, optimizer=None, options=None, **fields):
    optimizer = optimizer or optax.sgd(0.5)
    made = private(PeftTrainer)(
        model, optimizer, options or config(), mechanism=mechanism, **fields
    )
    return made.with_gen_model_input_fn(inputs_of)


def trained(model):
    lora = jax.tree.leaves(nnx.state(model, nnx.LoRAParam))
    return [*map(np.asarray, lora or jax.tree.leaves(nnx.state(model, nnx.Param)))]


def assert_moved_alike(ours, theirs, start):
    moved = max(np.abs(x - y).max() for x, y in zip(ours, start, strict=True))
    assert moved > 1e-2
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * moved)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama3", "full"), ("llama3", "nf4"), ("gemma3", "int8")],
)
def test_without_privacy_updates_are_those_of_tunix(name, kind):
    ours, theirs, start = (make(name, kind) for _ in range(3))
    make_trainer(ours, NOT_PRIVATE).train(DATA, progress=False)
    tunix = PeftTrainer(theirs, optax.sgd(0.5), config(max_steps=STEPS))
    tunix.with_gen_model_input_fn(inputs_of).train([DATA] * STEPS)
    assert_moved_alike(*map(trained, (ours, theirs, start)))


def train_pairs(model, reference, algorithm="dpo"):
    options = DPOTrainingConfig(algorithm=algorithm, eval_every_n_steps=100)
    trainer = private(DPOTrainer)(
        model, reference, optax.sgd(0.5), options, mechanism=NOT_PRIVATE
    )
    trainer.train(PAIRS, progress=False)


@pytest.mark.parametrize(("algorithm", "kind"), [("dpo", "lora"), ("orpo", "full")])
def test_preference_updates_are_those_of_tunix(algorithm, kind):
    ours, theirs, start = (make("llama3", kind) for _ in range(3))
    reference = make("llama3") if algorithm == "dpo" else None
    train_pairs(ours, reference, algorithm)
    options = {"algorithm": algorithm, "eval_every_n_steps": 100, "max_steps": STEPS}
    tunix = DPOTrainer(theirs, reference, optax.sgd(0.5), DPOTrainingConfig(**options))
    tunix.train([PAIRS] * STEPS)
    assert_moved_alike(*map(trained, (ours, theirs, start)))


def row(tree, i):
    return jax.tree.map(lambda x: x[i : i + 1], tree)


@pytest.mark.parametrize(("name", "kind"), [("llama3", "int8"), ("gemma3", "full")])
def test_contributions_are_the_clipped_gradients_of_single_examples(name, kind):
    trainer = make_trainer(make(name, kind))._make_trainer()
    loss_fn, params = trainer.loss_fn, make_trainer(make(name, kind))._params()
    grad = jax.jit(jax.grad(loss_fn))
    ones = [grad(params, row(DATA, i)) for i in range(SIZE)]
    grad_fn = dpmp.clipped_grad(
        loss_fn,
        l2_clip_norm=np.inf,
        batch_argnums=1,
        return_grad_norms=True,
        method="book_keeping",
        arithmetic="unproved_float32",
    )
    total, aux = grad_fn(params, DATA)
    norms = [optax.tree_utils.tree_norm(x) for x in ones]
    np.testing.assert_allclose(aux.grad_norms, norms, rtol=1e-5)
    for x, *parts in zip(*map(jax.tree.leaves, (total, *ones)), strict=True):
        np.testing.assert_allclose(x, sum(parts), atol=1e-5)
    text = str(dpmp.book_keeping.summarize(loss_fn, params, DATA))
    assert "fallback" not in text, text


class Recorder(hooks.TrainingHooks):
    def __init__(self):
        self.seen = []

    def on_train_start(self, trainer):
        self.seen.append("start")

    def on_train_end(self, trainer):
        self.seen.append("end")

    def on_train_step_start(self, trainer):
        raise AssertionError

    def on_train_step_end(self, trainer, step, loss):
        assert int(trainer.state.step) == step
        assert trainer.guarantee() == MECHANISM.guarantee(step)
        self.seen.append((step, loss))

    def on_eval_step_start(self, trainer):
        self.seen.append("batch")

    def on_eval_step_end(self, trainer, loss):
        self.seen.append("evaluated")


def test_loggers_and_hooks_see_released_numbers_alone(monkeypatch, caplog):
    mechanism = dataclasses.replace(
        MECHANISM, released_metrics=dpmp.ReleasedMetrics(largest_loss=8.0)
    )
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)
    logged, recorder = [], Recorder()
    monkeypatch.setattr(
        jax.monitoring,
        "record_scalar",
        lambda name, x, **options: logged.append((name, float(x), options["step"])),
    )
    options = config(eval_every_n_steps=2)
    trainer = make_trainer(WithDropout(), mechanism, optimizer, options)
    trainer.with_training_hooks(recorder)
    monkeypatch.setattr(logging.getLogger("absl"), "propagate", True)
    with caplog.at_level(logging.DEBUG, logger="absl"):
        trainer.train(DATA, [DATA], progress=False)
    assert trainer.train_steps == STEPS
    noisy = {k: float(x) for k, x in trainer.state.metrics.items()}
    train = [x for x in logged if "/train/" in x[0]]
    assert train[-3:] == [
        ("/train/loss", noisy["loss"], 3),
        ("/train/overflowed", noisy["overflowed"], 3),
        ("/train/learning_rate", 0.25, 3),
    ]
    assert len(train) == 3 * STEPS
    others = {x[0] for x in logged} - {x[0] for x in train}
    assert others == {"/eval/loss", "/eval/perplexity"}
    losses = [x for x in recorder.seen if isinstance(x, tuple)]
    assert losses == [(step, x) for name, x, step in train if name == "/train/loss"]
    once = ["batch", "evaluated"]
    steps = [losses[0], *once, losses[1], losses[2]]
    assert recorder.seen == [*once, "start", *steps, "end"]
    assert "eval loss" in caplog.text  # what Tunix logs is captured
    assert "training loss" not in caplog.text


def test_a_killed_program_goes_on(tmp_path):
    class StopError(Exception):
        pass

    class Stopping(Recorder):
        def on_train_step_end(self, trainer, step, loss):
            if step == 2:
                raise StopError

    options = config(
        checkpoint_root_directory=str(tmp_path / "run"),
        checkpointing_options=CheckpointManagerOptions(
            save_interval_steps=1, max_to_keep=2
        ),
    )
    first = make_trainer(make("llama3", "lora"), options=options)
    first.with_training_hooks(Stopping())
    with pytest.raises(StopError):
        first.train(DATA, progress=False)
    model = make("llama3", "lora")
    second = make_trainer(model, options=options)
    seen = []

    class Looking(Recorder):
        def on_train_start(self, trainer):
            seen.append((trainer.train_steps, trainer.guarantee()))

    second.with_training_hooks(Looking())
    second.train(DATA, progress=False)
    # The model was that of the checkpoint before the first evaluation.
    assert seen == [(2, first.guarantee())]
    assert second.train_steps == STEPS
    spent = Ledger(tmp_path / "run").spent
    assert [x.stop - x.start for x in spent.segments] == [2, 1]
    assert second.guarantee() == MECHANISM.guarantee()
    third_model = make("llama3", "lora")
    third = make_trainer(third_model, options=options)
    third.train(DATA, progress=False)  # nothing is left to do
    for x, y in zip(trained(model), trained(third_model), strict=True):
        np.testing.assert_array_equal(x, y)


def test_no_variable_and_no_copy_has_the_key():
    trainer = make_trainer(WithDropout(), prng_key=jax.random.key(123456789))
    assert "123456789" not in repr(vars(trainer))
    for copied in (copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match="prng_key cannot be copied or pickled"):
            copied(trainer)


def test_a_second_call_goes_on_and_pays_for_what_failed():
    calls = 0

    class Rows:
        def __len__(self):
            return SIZE

        def __getitem__(self, indices):
            nonlocal calls
            if isinstance(indices, int):
                raise TypeError
            calls += 1
            if calls == 3:
                raise OSError
            return jax.tree.map(lambda x: x[indices], DATA)

    trainer = make_trainer(WithDropout())
    with pytest.raises(RuntimeError, match="could not be loaded"):
        trainer.train(Rows(), progress=False)
    made = trainer.train_steps
    trainer.train(DATA, progress=False)
    assert 0 < made < STEPS == trainer.train_steps
    assert trainer.guarantee().epsilon > MECHANISM.guarantee().epsilon


def test_a_refused_call_loses_nothing():
    trainer = make_trainer(WithDropout())
    trainer.train(DATA, progress=False)
    with pytest.raises(ValueError, match="num_examples"):
        trainer.train(row(DATA, 0), progress=False)
    trainer.train(DATA, progress=False)  # nothing is left to do
    assert trainer.guarantee() == MECHANISM.guarantee()


@pytest.mark.parametrize("has_directory", [False, True])
def test_a_lost_state_does_not_start_again(has_directory, tmp_path):
    """Also if its checkpoints are gone."""
    directory = str(tmp_path / "run") if has_directory else None

    def failing(count):
        if count == 2:
            raise RuntimeError
        return np.float32(0)

    def update(updates, count, params=None):
        shape = jax.ShapeDtypeStruct((), np.float32)
        zero = jax.experimental.io_callback(failing, shape, count)
        return jax.tree.map(lambda x: x + zero, updates), count + 1

    optimizer = optax.GradientTransformation(lambda _: jnp.int32(0), update)
    options = config(
        checkpoint_root_directory=directory,
        checkpointing_options=directory
        and CheckpointManagerOptions(save_interval_steps=1),
    )
    model = WithDropout()
    trainer = make_trainer(model, optimizer=optimizer, options=options)
    with pytest.raises(Exception, match="RuntimeError"):
        trainer.train(DATA, progress=False)
    shutil.rmtree(tmp_path)
    assert trainer.train_steps == STEPS - 1
    assert trainer.guarantee() == MECHANISM.guarantee(STEPS - 1)
    with pytest.raises(RuntimeError, match="must have survived the last error"):
        trainer.train(DATA, progress=False)


def test_each_example_and_step_has_its_own_dropout():
    model = WithDropout()
    trainer = make_trainer(model)
    made = trainer._make_trainer()
    params = trainer._params()
    keys = jax.random.split(jax.random.key(0), 2)
    losses = [float(made.loss_fn(params, row(DATA, 0), key)) for key in keys]
    assert losses[0] != losses[1]
    trainer.train(DATA, progress=False)
    assert trainer.train_steps == STEPS


def test_parameters_in_bfloat16_have_float32_masters():
    model = make("llama3", "lora")
    cast = functools.partial(jax.tree.map, lambda x: x.astype(jnp.bfloat16))
    nnx.update(model, cast(nnx.state(model)))
    trainer = make_trainer(model)
    trainer.train(DATA, progress=False)
    assert {x.dtype.name for x in jax.tree.leaves(trainer.state.params)} == {"float32"}
    assert {x.dtype.name for x in trained(model)} == {"bfloat16"}


def test_devices_of_a_mesh_share_the_work():
    with jax.sharding.Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("fsdp", "tp")):
        trainer = make_trainer(make("llama3"))
        trainer.train(DATA, progress=False)
    assert trainer.train_steps == STEPS


class Overriding(PeftTrainer):
    def _train_step(self, model, optimizer, inputs):
        return super()._train_step(model, optimizer, inputs)


class WithMemory(WithDropout):
    def __init__(self):
        super().__init__()
        self.norm = nnx.BatchNorm(VOCABULARY, rngs=nnx.Rngs(0))

    def __call__(self, tokens, *_):
        return self.norm(self.embed(tokens)), None


class WithReference(WithDropout):
    """Memory that is changed in place."""

    def __init__(self):
        super().__init__()
        self.calls = nnx.Variable(jnp.zeros(()), ref=True)

    def __call__(self, tokens, *_):
        self.calls[...] += 1.0
        return self.embed(tokens), None


class WithConstants(WithDropout):
    """A table, and stacked layers whose dropout has a stack of keys."""

    def __init__(self):
        super().__init__()
        self.table = nnx.Variable(jnp.linspace(0.0, 1.0, VOCABULARY))
        make_layers = nnx.vmap(lambda rngs: nnx.Dropout(0.5, rngs=rngs))
        self.layers = make_layers(nnx.Rngs(dropout=1).fork(split=2))

    def __call__(self, tokens, *_):
        def layer(x, dropout):
            return dropout(x)

        scan = nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return scan(self.embed(tokens) * self.table[...], self.layers), None


REFUSED = {
    "accumulation": (lambda: run(gradient_accumulation_steps=2), "one batch"),
    "packing": (lambda: run(max_seq_token_per_tpu=64), "packed|supported"),
    "profiler": (lambda: run(profiler_options=object()), "profiler.trace"),
    "steps": (lambda: run(max_steps=5), "max_steps must be the iterations"),
    "policies": (
        lambda: run(checkpointing_options=CheckpointManagerOptions(keep_period=2)),
        "save_interval_steps and max_to_keep",
    ),
    "no directory": (
        lambda: run(checkpointing_options=CheckpointManagerOptions(max_to_keep=2)),
        "must come with a checkpoint_root_directory",
    ),
    "memory": (lambda: run(model=WithMemory()), r"changed=.*norm.*mean"),
    "memory in place": (lambda: run(model=WithReference()), r"changed=.*calls"),
    "evaluation that never comes": (
        lambda: run([row(DATA, 0)], eval_every_n_steps=0),
        "eval_every_n_steps must be",
    ),
    "axis": (lambda: run_on_mesh("data"), "must name axes of the mesh"),
    "one batch": (lambda: run(np.zeros((2, 3))), "eval_ds must be batches"),
    "batches": (lambda: run(data=iter([DATA])), "__getitem__ and __len__"),
    "list of batches": (lambda: run(data=[DATA, DATA]), "could be one of batches"),
    "inputs": (
        lambda: private(PeftTrainer)(
            WithDropout(), optax.sgd(0.5), config(), mechanism=MECHANISM
        ).train(DATA, progress=False),
        "with_gen_model_input_fn",
    ),
    "size": (lambda: run(data=row(DATA, 0)), "must hold the 8 examples"),
    "mechanism": (lambda: run(mechanism=None), "mechanism must be"),
    "no trainer": (lambda: private(dict), "trainer of Tunix"),
    "step": (lambda: private(Overriding), "overridden"),
    "early": (lambda: make_trainer(WithDropout()).guarantee(), "Call `train` first"),
    "private step": (
        lambda: make_trainer(WithDropout())._train_step(None, None, None),
        "makes its steps in `train`",
    ),
    "reference": (lambda: train_pairs(*2 * [make("llama3")]), r"nnx\.clone"),
    "evaluation": (lambda: run(DATA), "eval_ds must be batches"),
    "data hooks": (lambda: run(data_hooks=object()), "without data hooks"),
    "loss": (
        lambda: run().with_loss_fn(lambda *_: 0.0),
        "before the first `train`",
    ),
}


def run(
    eval_ds=None,
    *,
    model=None,
    data=DATA,
    mechanism=MECHANISM,
    data_hooks=None,
    **fields,
):
    made = make_trainer(model or WithDropout(), mechanism, options=config(**fields))
    if data_hooks is not None:
        made.with_data_hooks(data_hooks)
    made.train(data, eval_ds, progress=False)
    return made


def run_on_mesh(axis):
    with jax.sharding.Mesh(np.array(jax.devices()[:2]), (axis,)):
        return run()


@pytest.mark.parametrize("every", [0, None])
def test_without_public_data_nothing_is_evaluated(every):
    assert run(eval_every_n_steps=every).state.step == STEPS


def test_constants_and_stacked_layers_are_fine():
    model = WithConstants()
    before = np.asarray(model.table[...])
    assert run(model=model).state.step == STEPS
    np.testing.assert_array_equal(model.table[...], before)


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_break_the_guarantee_is_refused(case):
    call, match = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=match):
        call()
