import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from dpmp import (
    DPSGD,
    DPTrainer,
    Policy,
    SensitiveOutputs,
    TrainingState,
)
from dpmp.training._batches import draw_batch
from dpmp.training._tickets import draw_tickets

NUM_EXAMPLES = 12
EPS = 2.0**-23
KEY = jax.random.key(11)
FLOAT32 = Policy.from_name("float32")
MIXED = Policy.from_name("mixed_bfloat16")


def make_data(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(NUM_EXAMPLES, 3)).astype(np.float32),
        "label": rng.integers(0, 2, NUM_EXAMPLES).astype(np.int32),
    }


def logistic_loss(params, batch):
    logits = batch["x"] @ params["w"] + params["b"]
    sign = (2 * batch["label"] - 1).astype(logits.dtype)
    return jnp.mean(jnp.logaddexp(jnp.zeros_like(logits), -sign * logits))


def make_params():
    return {"w": jnp.array([0.5, -1.0, 0.25]), "b": jnp.array(0.1)}


def make_trainer(
    loss_fn=logistic_loss,
    optimizer=None,
    *,
    policy=FLOAT32,
    uses_prng_key=False,
    is_private=True,
    prng_key=KEY,
    **fields,
):
    defaults = {
        "num_examples": NUM_EXAMPLES,
        "expected_batch_size": 4,
        "iterations": 6,
        "l2_clip_norm": 1.0,
        "noise_multiplier": 1.0,
    }
    mechanism = DPSGD(**{**defaults, **fields})
    return DPTrainer(
        mechanism=mechanism if is_private else mechanism.without_privacy(),
        loss_fn=loss_fn,
        optimizer=optimizer or optax.sgd(0.1, momentum=0.9),
        policy=policy,
        uses_prng_key=uses_prng_key,
        prng_key=prng_key,
    )


@functools.cache
def default_trainer():
    """One for all tests that need nothing else, compiled once."""
    return make_trainer()


def batches_of(trainer):
    """The indices that `fit` will draw from the beginning, without padding."""

    def indices_of(ticket):
        batch = draw_batch(trainer.mechanism, lambda x: {"i": x}, None, ticket)
        return np.asarray(batch.examples["i"])[~batch.is_padding_example]

    steps = range(trainer.mechanism.iterations)
    return [indices_of(x) for x in draw_tickets(steps, trainer._root)]


def to_numpy(tree):
    return jax.tree.map(np.array, tree)


def save(state):
    """The state as bytes, as a checkpoint would hold it."""
    return pickle.dumps(to_numpy(state))


def load(checkpoint):
    state = pickle.loads(checkpoint)
    return jax.tree.map(jnp.asarray, state)._replace(spent=state.spent)


def assert_bitwise_equal(actual, expected):
    """`spent` has random public ids, and is left out."""
    if isinstance(actual, TrainingState):
        actual, expected = actual._replace(spent=None), expected._replace(spent=None)
    actual, expected = to_numpy(actual), to_numpy(expected)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()


class RecordingSource:
    """A `Source` that remembers what it was asked for."""

    def __init__(self, arrays):
        self.arrays = arrays
        self.requests = []

    def __getitem__(self, indices):
        self.requests.append(indices)
        return jax.tree.map(lambda x: x[indices], self.arrays)

    def __len__(self):
        return NUM_EXAMPLES

    @property
    def batches(self):
        """The requests after those for the first records, which come at the start."""
        return [x for x in self.requests if isinstance(x, np.ndarray)][1:]


def constant_gradient(params, batch):
    """A loss whose gradient is one for every parameter and example."""
    return jnp.sum(params) + 0 * jnp.sum(batch["x"])


def zero_gradient(params, batch):
    return 0 * jnp.sum(params) + 0 * jnp.sum(batch["x"])


# Without privacy: plain training.


@pytest.mark.parametrize(
    ("optimizer", "method"),
    [
        (optax.sgd(0.5), "per_example"),
        (optax.adam(0.1), "per_example"),
        (optax.sgd(0.5), "book_keeping"),
    ],
    ids=["sgd", "adam", "book-keeping"],
)
def test_without_privacy_it_is_plain_training_on_the_same_batches(optimizer, method):
    trainer = make_trainer(
        optimizer=optimizer,
        is_private=False,
        iterations=10,
        method=method,
    )
    data, params = make_data(), make_params()
    state = trainer.init(params)
    batches = batches_of(trainer)
    # optax.adam itself mixes integers and floats.
    with jax.numpy_dtype_promotion("standard"):
        opt_state = optimizer.init(params)
        for indices in batches:
            grads = jax.tree.map(jnp.zeros_like, params)
            for i in indices:
                example = jax.tree.map(lambda x, i=i: x[i : i + 1], data)
                grad = jax.grad(logistic_loss)(params, example)
                grads = jax.tree.map(jnp.add, grads, grad)
            grads = jax.tree.map(lambda x: x / jnp.float32(4), grads)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
        state = trainer.fit(state, data, progress=False)
    # Ten steps, some twenty roundings each, of numbers of order one.
    for name in params:
        np.testing.assert_allclose(
            state.params[name], params[name], rtol=0, atol=200 * EPS
        )


def test_an_empty_batch_changes_nothing_but_the_step():
    trainer = make_trainer(
        optimizer=optax.sgd(0.5),
        is_private=False,
        expected_batch_size=1,
        prng_key=jax.random.key(4),  # with this key, some batches are empty
    )
    state = trainer.init(make_params())
    sizes = [len(indices) for indices in batches_of(trainer)]
    assert 0 in sizes
    assert any(sizes)
    history = [to_numpy(state.params)]
    source = RecordingSource(make_data())
    state = trainer.fit(
        state,
        source,
        progress=False,
        callback=lambda state: history.append(to_numpy(state.params)),
    )
    assert state.step == 6
    assert [len(indices) for indices in source.batches] == list(filter(None, sizes))
    for size, before, after in zip(sizes, history[:-1], history[1:], strict=True):
        is_same = all(np.all(before[name] == after[name]) for name in before)
        assert is_same == (size == 0)


# What is added and how much an example can change.


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"microbatch_size": 3, "l2_clip_norm": 0.5},
        {"arithmetic": "float32", "noise_multiplier": 2.5},
        {"expected_batch_size": 12, "rescale_to_unit_norm": True, "l2_clip_norm": 7.0},
    ],
    ids=["plain", "microbatches", "float32", "whole-dataset"],
)
def test_a_step_adds_noise_of_the_accounted_scale(fields):
    size = 100_000
    trainer = make_trainer(zero_gradient, optax.sgd(1.0), iterations=1, **fields)
    state = trainer.init(jnp.zeros(size))
    state = trainer.fit(state, make_data(), progress=False)
    noise = np.asarray(state.params, np.float64)
    contribution = 1.0 if "rescale_to_unit_norm" in fields else None
    contribution = contribution or fields.get("l2_clip_norm", 1.0)
    noise_multiplier = fields.get("noise_multiplier", 1.0)
    expected_batch_size = fields.get("expected_batch_size", 4)
    stddev = noise_multiplier * contribution / expected_batch_size

    def has_stddev(stddev):
        statistic = np.sum(np.square(noise / stddev))
        tail = min(stats.chi2.cdf(statistic, size), stats.chi2.sf(statistic, size))
        return 2 * tail > 1e-6

    assert has_stddev(stddev)
    for factor in (0.7, 0.95, 1.05, 1.3):
        assert not has_stddev(factor * stddev)


@pytest.mark.parametrize("policy", [FLOAT32, MIXED], ids=["float32", "mixed_bfloat16"])
def test_one_example_moves_a_step_by_the_clip_norm_and_no_further(policy):
    def loss_fn(params, batch):
        return jnp.sum(batch["x"] @ params)

    trainer = make_trainer(
        loss_fn, optax.sgd(1.0), policy=policy, expected_batch_size=12
    )

    def step(first_example):
        data = {"x": np.full((NUM_EXAMPLES, 3), 0.125, np.float32)}
        data["x"][0] = first_example
        state = trainer.init(jnp.zeros(3))
        return np.asarray(
            trainer.fit(state, data, progress=False, stop_at=1).params, np.float64
        )

    without = step(0.0)
    bound = 1.0 / 12
    # The same noise is in all of them: float32 roundings of numbers of order one
    # remain.
    for outlier in ([1e15, 0, 0], [3.0, -4.0, 12.0], [0, 0, 1.0]):
        distance = np.linalg.norm(step(outlier) - without)
        assert 0.99 * bound < distance < bound + 4 * EPS
    assert np.linalg.norm(step([0.3, 0.4, 0]) - without) == pytest.approx(
        bound / 2, rel=0.01
    )
    for unusable in (np.inf, np.nan):
        np.testing.assert_array_equal(step(unusable), without)


def test_noise_differs_between_steps_and_runs():
    history = []
    fresh = make_trainer(zero_gradient, optax.sgd(1.0), prng_key=None)
    keys = [KEY, jax.random.key(12)]
    given = [make_trainer(zero_gradient, optax.sgd(1.0), prng_key=x) for x in keys]
    for trainer in (*given, fresh, fresh):
        history.append(np.zeros(3, np.float32))
        trainer.fit(
            trainer.init(jnp.zeros(3)),
            make_data(),
            progress=False,
            callback=lambda state: history.append(np.array(state.params)),
        )
    noise = np.diff(np.array(history).reshape(4, 7, 3), axis=1)
    assert len(np.unique(noise)) == noise.size


# Precision.


def test_master_parameters_gather_updates_below_the_resolution_of_bfloat16():
    steps, learning_rate = 20, 1e-3
    trainer = make_trainer(
        constant_gradient,
        optax.sgd(learning_rate),
        policy=MIXED,
        is_private=False,
        iterations=steps,
        expected_batch_size=12,
    )
    # Bfloat16 numbers below 1 are 2^-8 apart: in bfloat16 each update would be lost.
    state = trainer.fit(trainer.init(jnp.ones(5)), make_data(), progress=False)
    assert state.params.dtype == jnp.float32
    expected = 1 - steps * learning_rate
    np.testing.assert_allclose(state.params, expected, rtol=2 * steps * EPS)


def test_the_loss_sees_compute_dtypes_and_untouched_integers():
    seen = []

    def loss_fn(params, batch, key):
        seen.append(jax.tree.map(lambda x: (str(x.dtype), x.shape), (params, batch)))
        assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        return logistic_loss(params, batch)

    trainer = make_trainer(loss_fn, policy=MIXED, uses_prng_key=True)
    data = make_data() | {
        "mask": np.ones((NUM_EXAMPLES, 2), bool),
        "image": np.zeros((NUM_EXAMPLES, 2), np.uint8),
        "double": np.zeros((NUM_EXAMPLES, 1, 1), np.float64),
    }
    state = trainer.init(make_params())
    trainer.fit(state, data, progress=False, stop_at=1)
    params = {"w": ("bfloat16", (3,)), "b": ("bfloat16", ())}
    batch = {
        "x": ("bfloat16", (1, 3)),
        "label": ("int32", (1,)),
        "mask": ("bool", (1, 2)),
        "image": ("uint8", (1, 2)),
        "double": ("bfloat16", (1, 1, 1)),
    }
    assert seen == [(params, batch)] * len(seen)
    assert seen


@pytest.mark.parametrize(
    ("policy", "dtype"), [(FLOAT32, "float32"), (MIXED, "bfloat16")]
)
def test_per_example_gradients_are_in_the_compute_dtype(policy, dtype):
    seen = []

    @jax.custom_vjp
    def spy(params):
        return params

    def backward(_, grad):
        seen.append(str(grad.dtype))
        return (grad,)

    spy.defvjp(lambda params: (params, None), backward)

    def loss_fn(params, batch):
        return logistic_loss(jax.tree.map(spy, params), batch)

    trainer = make_trainer(loss_fn, policy=policy)
    outputs = []
    state = trainer.init(make_params())
    trainer.fit(
        state,
        make_data(),
        progress=False,
        stop_at=1,
        sensitive_callback=outputs.append,
    )
    assert set(seen) == {dtype}
    # Norms are float32 nonetheless.
    assert outputs[0].grad_norms.dtype == jnp.float32


def test_a_whole_run_is_compiled_once():
    loss_traces, step_traces = [], []

    def loss_fn(params, batch):
        loss_traces.append(None)
        return logistic_loss(params, batch)

    inner = optax.sgd(0.1, momentum=0.9)

    def update(*args):
        step_traces.append(None)
        return inner.update(*args)

    optimizer = optax.GradientTransformation(inner.init, update)
    trainer = make_trainer(loss_fn, optimizer, policy=MIXED)
    counts = []
    for _ in range(2):
        trainer.fit(
            trainer.init(make_params()),
            make_data(),
            progress=False,
            callback=lambda _: counts.append((len(loss_traces), len(step_traces))),
        )
    assert len(step_traces) == 1
    assert set(counts) == {counts[0]}


def test_float64_sums_leave_the_dtypes_of_the_state_alone():
    # A state that changes its dtypes cannot be restored into that of a new `init`.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        trainer = make_trainer(optimizer=optax.adam(0.1), arithmetic="float64")
        params = jax.tree.map(lambda x: x.astype(jnp.float32), make_params())
        state = trainer.init(params)
        before = jax.tree.map(lambda x: x.dtype, state)
        state = trainer.fit(state, make_data(), progress=False, stop_at=1)
        assert jax.tree.map(lambda x: x.dtype, state) == before


@pytest.mark.parametrize(
    ("policy", "arithmetic"),
    [
        (("float32", "float32"), "float64"),
        (("float64", "float32"), "float32"),
        (("float64", "float64"), "float64"),
    ],
)
def test_wide_dtypes_work_under_strict_promotion(policy, arithmetic):
    with jax.enable_x64(True):
        trainer = make_trainer(policy=Policy(*policy), arithmetic=arithmetic)
        state = trainer.init(make_params())
        state = trainer.fit(state, make_data(), progress=False, stop_at=2)
        assert state.params["w"].dtype == policy[0]
        assert np.all(np.isfinite(state.params["w"]))


# The state.


def test_the_state_is_donated_and_initial_parameters_are_not():
    trainer = default_trainer()
    params = make_params()
    before = to_numpy(params)
    state = trainer.init(params)
    new_state = trainer.fit(state, make_data(), progress=False, stop_at=1)
    assert state.params["w"].is_deleted()
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(state.params["w"])
    assert not new_state.params["w"].is_deleted()
    assert_bitwise_equal(params, before)
    trainer.fit(trainer.init(params), make_data(), progress=False, stop_at=1)


def test_an_optimizer_may_keep_the_initial_parameters():
    pull_back = optax.GradientTransformation(
        lambda params: params,
        lambda updates, start, params: (
            jax.tree.map(lambda u, s, p: u + (s - p), updates, start, params),
            start,
        ),
    )
    trainer = make_trainer(optimizer=optax.chain(pull_back, optax.sgd(0.1)))
    state = trainer.init(make_params())
    state = trainer.fit(state, make_data(), progress=False, stop_at=2)
    assert state.step == 2


@pytest.mark.parametrize("policy", [FLOAT32, MIXED], ids=["float32", "mixed_bfloat16"])
def test_a_run_can_be_interrupted_after_any_step(policy):
    def loss_fn(params, batch, key):
        keep = jax.random.bernoulli(key, 0.5, (1, 3))
        batch = batch | {"x": jnp.where(keep, batch["x"], 0)}
        return logistic_loss(params, batch)

    # Two trainers, as in two processes.
    before, after = (
        make_trainer(loss_fn, policy=policy, uses_prng_key=True) for _ in range(2)
    )
    data = make_data()

    def run(state, trainer, stop_at=None):
        return trainer.fit(state, data, progress=False, stop_at=stop_at)

    uninterrupted = run(before.init(make_params()), before)
    assert uninterrupted.step == 6
    for k in range(7):
        state = run(before.init(make_params()), before, stop_at=k)
        assert state.step == k
        assert_bitwise_equal(run(load(save(state)), after), uninterrupted)


def test_an_epoch_may_be_run_step_by_step():
    trainer = default_trainer()
    data = make_data()
    expected = trainer.fit(trainer.init(make_params()), data, progress=False)
    state = trainer.init(make_params())
    size = trainer.mechanism.padded_batch_size
    for indices in batches_of(trainer):
        # Padding holds data here, to be ignored.
        padded = np.resize(np.append(indices, 0), size)
        batch = {name: x[padded] for name, x in data.items()}
        is_padding = np.arange(size) >= len(indices)
        state = trainer.train_step(state, batch, is_padding)
        assert isinstance(state, TrainingState)
    assert_bitwise_equal(state, expected)
    with pytest.raises(
        ValueError, match="step must be below iterations = 6; got step=6"
    ):
        trainer.train_step(state, batch, is_padding)


def test_a_run_may_be_made_of_batches_of_load_batch():
    trainer, data = default_trainer(), make_data()
    expected = trainer.fit(trainer.init(make_params()), data, progress=False)
    state = trainer.init(make_params())
    for _ in range(6):
        state = trainer.train_step(state, trainer.load_batch(state, data))
    assert_bitwise_equal(state, expected)


# Randomness in the loss.


@pytest.mark.parametrize("key", [KEY, None], ids=["given", "fresh"])
def test_every_example_and_step_has_a_key_of_its_own(key):
    def loss_fn(params, batch, key):
        del batch
        return 0 * jnp.sum(params) + jax.random.uniform(key)

    trainer = make_trainer(
        loss_fn, uses_prng_key=True, expected_batch_size=12, prng_key=key
    )

    def values():
        outputs = []
        trainer.fit(
            trainer.init(jnp.zeros(2)),
            make_data(),
            progress=False,
            sensitive_callback=lambda x: outputs.append(np.array(x.values)),
        )
        return np.array(outputs)

    first, second = values(), values()
    assert first.shape == (6, NUM_EXAMPLES)
    assert len(np.unique(first)) == first.size
    assert np.array_equal(first, second) == (key is not None)


# Data.


def test_a_source_is_asked_for_the_sampled_examples_alone():
    trainer = default_trainer()
    data = make_data()
    state = trainer.init(make_params())
    batches = batches_of(trainer)
    source = RecordingSource(data)
    from_source = trainer.fit(state, source, progress=False)
    assert len(source.batches) == len(batches)
    for request, indices in zip(source.batches, batches, strict=True):
        assert request.dtype == np.int64
        np.testing.assert_array_equal(request, indices)
    from_arrays = trainer.fit(trainer.init(make_params()), data, progress=False)
    assert_bitwise_equal(from_source, from_arrays)


def test_a_dataset_of_another_size_is_refused_before_the_state_is_donated():
    trainer = default_trainer()
    state = trainer.init(make_params())
    source = jax.tree.map(lambda x: x[1:], make_data())
    with pytest.raises(ValueError, match="dataset must hold the 12 examples"):
        trainer.fit(state, source, progress=False)
    assert not state.params["w"].is_deleted()


class SourceThatVaries(RecordingSource):
    """Gives another batch from its second on."""

    def __init__(self, arrays, change):
        super().__init__(arrays)
        self.change = change

    def __getitem__(self, indices):
        batch = super().__getitem__(indices)
        return self.change(batch) if len(self.batches) > 1 else batch


CHANGES_OF_A_BATCH = {
    "shape": lambda batch: batch | {"x": np.pad(batch["x"], [(0, 0), (0, 1)])},
    "dtype": lambda batch: batch | {"label": batch["label"].astype(np.int8)},
    "tree": lambda batch: batch | {"more": batch["x"]},
}


@pytest.mark.parametrize("name", CHANGES_OF_A_BATCH)
def test_batches_that_differ_in_more_than_values_are_refused(name):
    traces = []

    def loss_fn(params, batch):
        traces.append(None)
        return logistic_loss(params, batch | {"x": batch["x"][:, :3]})

    # With this key, the first batches are not empty.
    trainer = make_trainer(loss_fn, prng_key=jax.random.key(0))
    data = make_data()
    source = SourceThatVaries(data, CHANGES_OF_A_BATCH[name])
    counts = []

    def init():
        return trainer.init(make_params())

    with pytest.raises(ValueError, match="same tree, shapes and dtypes") as error:
        trainer.fit(
            init(),
            source,
            progress=False,
            callback=lambda _: counts.append(len(traces)),
        )
    assert counts == [len(traces)]
    assert not any(letter.isdigit() for letter in str(error.value).split("dpmp:")[0])
    # A run that goes on is held to the same, and so are batches that are not loaded.
    message = r"all batches must have the same tree, shapes and dtypes.*Pad examples"
    with pytest.raises(ValueError, match=message):
        trainer.fit(init(), source, progress=False)
    batch = jax.tree.map(lambda x: x[:NUM_EXAMPLES], CHANGES_OF_A_BATCH[name](data))
    with pytest.raises(ValueError, match=message):
        trainer.train_step(init(), batch, np.zeros(NUM_EXAMPLES, bool))


def test_a_batch_that_does_not_run_sets_no_standard():
    trainer = make_trainer()
    state = trainer.init(make_params())
    wrong = make_data() | {"x": np.ones((NUM_EXAMPLES, 2), np.float32)}
    with pytest.raises(TypeError, match="dot_general"):
        trainer.fit(state, wrong, progress=False, stop_at=1)
    assert trainer.fit(state, make_data(), progress=False, stop_at=1).step == 1


def test_a_batch_whose_program_fails_sets_no_standard():
    def fail(x):
        raise MemoryError

    def loss_fn(params, batch):
        loss = logistic_loss(params, batch | {"x": batch["x"][:, :3]})
        if batch["x"].shape[1] == 3:
            return loss
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        total = jax.lax.stop_gradient(jnp.sum(batch["x"]))
        return loss + jax.pure_callback(fail, shape, total, vmap_method="sequential")

    trainer = make_trainer(loss_fn)
    state = trainer.init(make_params())
    long = make_data() | {"x": np.ones((NUM_EXAMPLES, 5), np.float32)}
    with pytest.raises(jax.errors.JaxRuntimeError, match="callback"):
        jax.block_until_ready(trainer.fit(state, long, progress=False, stop_at=1))
    state = trainer.init(make_params())
    assert trainer.fit(state, make_data(), progress=False, stop_at=1).step == 1


def test_a_step_is_compiled_even_where_jit_is_disabled():
    def fit():
        trainer = make_trainer()
        state = trainer.init(make_params())
        return trainer.fit(state, make_data(), progress=False, stop_at=2).params

    with jax.disable_jit():
        without_jit = fit()
    jax.tree.map(np.testing.assert_array_equal, without_jit, fit())


def test_going_back_is_refused_and_standing_still_is_not():
    trainer = default_trainer()
    state = trainer.fit(
        trainer.init(make_params()), make_data(), progress=False, stop_at=3
    )
    with pytest.raises(ValueError, match="from the current step to 6; got step=3"):
        trainer.fit(state, make_data(), progress=False, stop_at=2)
    assert_bitwise_equal(
        trainer.fit(state, make_data(), progress=False, stop_at=3), state
    )


def test_a_batch_that_is_not_padded_is_refused():
    trainer, size = default_trainer(), 7
    batch = jax.tree.map(lambda x: np.resize(x, (size, *x.shape[1:])), make_data())
    message = "every batch must be padded to 12 examples"
    with pytest.raises(ValueError, match=message) as error:
        trainer.train_step(trainer.init(make_params()), batch, np.zeros(size, bool))
    assert str(size) not in str(error.value)


# What the loss closes over.


def frozen_losses(frozen):
    """Ways to use an array that is not an argument."""

    def apply(params):
        return jnp.sum(jnp.sin(frozen) * params)

    return {
        "plain": apply,
        "jit": jax.jit(apply),
        "checkpoint": jax.checkpoint(apply),
    }


@pytest.mark.parametrize("kind", ["plain", "numpy", "jit", "checkpoint"])
def test_what_the_loss_closes_over_is_an_argument_of_the_program(kind):
    frozen = np.random.default_rng(0).normal(size=(2**18, 4)).astype(np.float32)
    if kind != "numpy":
        frozen = jnp.asarray(frozen)  # 4 MB
    apply = frozen_losses(frozen)["plain" if kind == "numpy" else kind]

    def loss_fn(params, batch):
        return apply(params) + 0 * jnp.sum(batch["x"])

    trainer = make_trainer(loss_fn)
    state = trainer.init(jnp.zeros(4))
    _, constants = trainer._step.make_program(state._replace(spent=None), make_data())
    assert max(x.nbytes for x in constants) == frozen.nbytes
    assert len(trainer.lower(state, make_data()).as_text()) < 1e6


def test_a_frozen_array_may_be_closed_over_or_come_with_the_data():
    frozen = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)
    data = make_data()

    def run(frozen_of, data):
        def loss_fn(params, batch):
            features = jnp.tanh(batch["x"] @ frozen_of(batch))
            return logistic_loss(params, batch | {"x": features})

        trainer = make_trainer(loss_fn)
        state = trainer.init(make_params())
        return trainer.fit(state, data, progress=False).params

    closed_over = run(lambda batch: frozen, data)
    as_data = run(
        lambda batch: batch["frozen"][0], data | {"frozen": np.stack([frozen] * 12)}
    )
    for name in closed_over:
        # A few roundings in each of six steps of order one.
        np.testing.assert_allclose(
            closed_over[name], as_data[name], rtol=0, atol=100 * EPS
        )


# What comes out.


def test_the_callback_sees_the_state_after_every_step():
    trainer = default_trainer()
    states = []
    final = trainer.fit(
        trainer.init(make_params()),
        make_data(),
        progress=False,
        callback=lambda state: states.append(to_numpy(state)),
    )
    assert all(isinstance(state, TrainingState) for state in states)
    assert [int(state.step) for state in states] == [1, 2, 3, 4, 5, 6]
    assert_bitwise_equal(states[-1], final)


def test_the_sensitive_callback_sees_losses_and_norms_before_clipping():
    trainer = make_trainer(l2_clip_norm=1e-3)
    data, params = make_data(), make_params()
    state = trainer.init(params)
    indices = batches_of(trainer)[0]
    outputs = []
    trainer.fit(
        state, data, progress=False, stop_at=1, sensitive_callback=outputs.append
    )
    (sensitive,) = outputs
    assert isinstance(sensitive, SensitiveOutputs)
    num_members = len(indices)
    np.testing.assert_array_equal(
        sensitive.is_padding_example, np.arange(NUM_EXAMPLES) >= num_members
    )
    assert 0 < num_members < NUM_EXAMPLES
    for position, i in enumerate(indices):
        example = jax.tree.map(lambda x, i=i: x[i : i + 1], data)
        value, grad = jax.value_and_grad(logistic_loss)(params, example)
        norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grad)))
        # Some ten roundings of numbers of order one.
        assert sensitive.values[position] == pytest.approx(value, abs=20 * EPS)
        assert sensitive.grad_norms[position] == pytest.approx(norm, abs=20 * EPS)
    np.testing.assert_array_equal(sensitive.values[num_members:], 0)
    np.testing.assert_array_equal(sensitive.grad_norms[num_members:], 0)


def test_looking_at_sensitive_values_changes_nothing():
    trainer = default_trainer()
    first, second = (
        trainer.fit(
            trainer.init(make_params()),
            make_data(),
            progress=False,
            sensitive_callback=sensitive_callback,
        )
        for sensitive_callback in (None, lambda outputs: None)
    )
    assert_bitwise_equal(first, second)


def test_progress_goes_to_standard_error_and_quotes_epsilon(capsys):
    trainer = make_trainer(delta=1e-5)
    state = trainer.init(make_params())
    state = trainer.fit(state, make_data(), stop_at=2)
    trainer.fit(state, make_data(), stop_at=4, progress=False)
    captured = capsys.readouterr()
    assert captured.out == ""
    headline, *lines, ending = captured.err.splitlines()
    assert headline.startswith('method="per_example", arithmetic="exact"')
    assert ending.startswith("dpmp: steps 1 to 2 done in 0:00:")
    assert ending.endswith(" at delta 1e-05")
    assert [line.split(",")[0] for line in lines] == ["step 1/2", "step 2/2"]
    assert all(" epsilon " in line for line in lines)
    assert all("noisy overflowed" in line for line in lines)


def test_book_keeping_trains_and_resumes_bit_for_bit():
    trainer = make_trainer(
        policy=Policy.from_name("mixed_bfloat16"),
        method="book_keeping",
        arithmetic="bounded",
        microbatch_size=2,
    )
    data = make_data()
    whole = trainer.fit(trainer.init(make_params()), data, progress=False)
    half = trainer.init(make_params())
    half = trainer.fit(half, data, stop_at=3, progress=False)
    resumed = trainer.fit(load(save(half)), data, progress=False)
    assert_bitwise_equal(resumed, whole)
    assert whole.params["w"].dtype == jnp.float32


@pytest.mark.parametrize("flag", ["jax_debug_nans", "jax_debug_infs"])
def test_debug_flags_show_nothing_of_an_example(flag):
    data = make_data()
    data["x"][3] = np.nan if flag == "jax_debug_nans" else np.inf
    trainer = make_trainer(expected_batch_size=NUM_EXAMPLES)  # every example is drawn
    state = trainer.init(make_params())
    jax.config.update(flag, True)
    try:
        state = trainer.fit(state, data, stop_at=1, progress=False)
    finally:
        jax.config.update(flag, False)
    assert np.all(np.isfinite(state.params["w"]))
