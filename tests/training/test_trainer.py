import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats
from small_runs import fixed_tickets, new_trainer, same, without_failures

from dpmp import Policy, SensitiveOutputs, TrainingState
from dpmp.training._tickets import draw_batch, draw_tickets

NUM_EXAMPLES = 16
EPS = 2.0**-23
KEY = jax.random.key(11)
RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(size=(NUM_EXAMPLES, 3)).astype(np.float32),
    "label": RNG.integers(0, 2, NUM_EXAMPLES).astype(np.int32),
}
PARAMS = {"w": np.float32([0.5, -1.0, 0.25]), "b": np.float32(0.1)}
POLICIES = ["float32", "mixed_bfloat16"]
FIELDS = {"num_examples": NUM_EXAMPLES, "expected_batch_size": 4, "iterations": 6}


def logistic_loss(params, batch):
    logits = batch["x"] @ params["w"] + params["b"]
    sign = (2 * batch["label"] - 1).astype(logits.dtype)
    return jnp.mean(jnp.logaddexp(jnp.zeros_like(logits), -sign * logits))


def make_trainer(loss_fn=logistic_loss, optimizer=None, **fields):
    fields = FIELDS | {"prng_key": KEY} | fields
    return new_trainer(loss_fn=loss_fn, optimizer=optimizer, **fields)


def default_trainer():
    """One for all tests that need nothing else, compiled once."""
    return without_failures(_default_trainer())


@functools.cache
def _default_trainer():
    return make_trainer()


def fit(trainer, source=DATA, *, state=None, params=PARAMS, **options):
    state = trainer.init(params) if state is None else state
    return trainer.fit(state, source, progress=False, **options)


def recorder():
    """A list, and a callback that adds a copy of the parameters to it."""
    history = []
    return history, lambda state: history.append(jax.tree.map(np.array, state.params))


def zero_gradient(params, batch):
    return 0 * jnp.sum(params) + 0 * jnp.sum(batch["x"])


def batches_of(trainer):
    """The indices that `fit` will draw from the beginning, without padding."""

    def indices_of(ticket):
        batch = draw_batch(trainer.mechanism, lambda x: {"i": x}, None, ticket)
        return np.asarray(batch.examples["i"])[~batch.is_padding_example]

    steps = range(trainer.mechanism.iterations)
    return [indices_of(x) for x in draw_tickets(steps, trainer._root)]


class RecordingSource:
    """A `Source` that remembers what it was asked for."""

    def __init__(self, arrays):
        self.arrays = arrays
        self.requests = []

    def __getitem__(self, indices):
        if not np.ndim(indices):
            raise TypeError("an array, please")
        self.requests.append(indices)
        return jax.tree.map(lambda x: x[indices], self.arrays)

    def __len__(self):
        return NUM_EXAMPLES

    @property
    def batches(self):
        """The requests after those for the first records, which come at the start."""
        return [x for x in self.requests if isinstance(x, np.ndarray)][1:]


# Without privacy: plain training.


@pytest.mark.parametrize(
    ("optimizer", "method"),
    [(optax.adam(0.1), "per_example"), (optax.sgd(0.5), "book_keeping")],
    ids=["adam", "sgd"],
)
def test_without_privacy_it_is_plain_training_on_the_same_batches(optimizer, method):
    trainer = make_trainer(
        optimizer=optimizer, is_private=False, iterations=10, method=method
    )
    params, grad_fn = PARAMS, jax.jit(jax.grad(logistic_loss))
    # optax.adam itself mixes integers and floats.
    with jax.numpy_dtype_promotion("standard"):
        opt_state = optimizer.init(params)
        for indices in batches_of(trainer):
            grads = jax.tree.map(np.zeros_like, params)
            for i in indices:
                example = {name: x[i : i + 1] for name, x in DATA.items()}
                grads = jax.tree.map(np.add, grads, grad_fn(params, example))
            grads = jax.tree.map(lambda x: x / np.float32(4), grads)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
        state = fit(trainer)
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
    sizes = [len(indices) for indices in batches_of(trainer)]
    assert 0 in sizes
    assert any(sizes)
    (history, callback), source = recorder(), RecordingSource(DATA)
    assert fit(trainer, source, callback=callback).step == 6
    assert [len(indices) for indices in source.batches] == list(filter(None, sizes))
    for size, before, after in zip(sizes, [PARAMS, *history], history, strict=False):
        assert same(before, after) == (size == 0)


# What is added and how much an example can change.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stddev", "fields"),
    [
        (1 / 4, {}),
        (0.5 / 4, {"microbatch_size": 3, "l2_clip_norm": 0.5}),
        (2.5 / 4, {"arithmetic": "float32", "noise_multiplier": 2.5}),
    ],
    ids=["plain", "microbatches", "float32"],
)
def test_a_step_adds_noise_of_the_accounted_scale(stddev, fields):
    size = 100_000
    trainer = make_trainer(zero_gradient, optax.sgd(1.0), iterations=1, **fields)
    noise = np.asarray(fit(trainer, params=jnp.zeros(size)).params, np.float64)

    def has_stddev(stddev):
        statistic = np.sum(np.square(noise / stddev))
        tail = min(stats.chi2.cdf(statistic, size), stats.chi2.sf(statistic, size))
        return 2 * tail > 1e-6

    assert has_stddev(stddev)
    for factor in (0.7, 0.95, 1.05, 1.3):
        assert not has_stddev(factor * stddev)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_example_moves_a_step_by_the_clip_norm_and_no_further(policy):
    def loss_fn(params, batch):
        return jnp.sum(batch["x"] @ params)

    trainer = make_trainer(
        loss_fn, optax.sgd(1.0), policy=policy, expected_batch_size=NUM_EXAMPLES
    )

    def step(first_example):
        data = {"x": np.full((NUM_EXAMPLES, 3), 0.125, np.float32)}
        data["x"][0] = first_example
        state = fit(trainer, data, params=jnp.zeros(3), stop_at=1)
        return np.asarray(state.params, np.float64)

    without = step(0.0)
    bound = 1.0 / NUM_EXAMPLES
    # The same noise is in all of them: float32 roundings of numbers of order one
    # remain.
    for outlier in ([1e15, 0, 0], [3.0, -4.0, 12.0], [0, 0, 1.0]):
        distance = np.linalg.norm(step(outlier) - without)
        assert 0.95 * bound < distance < bound + 4 * EPS
    distance = np.linalg.norm(step([0.3, 0.4, 0]) - without)
    assert distance == pytest.approx(bound / 2, rel=0.03)
    for unusable in (np.inf, np.nan):
        np.testing.assert_array_equal(step(unusable), without)


# Precision.


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_step_rounds_the_products_of_its_policy(share):
    policy = Policy("float32", "float32", products="float8", rounded_share=share)
    with pytest.warns(UserWarning, match="products of few bits are emulated"):
        trainer = make_trainer(policy=policy)
    batch = jax.tree.map(lambda x: x[: trainer.mechanism.padded_batch_size], DATA)
    program = trainer.lower(trainer.init(PARAMS), batch).as_text()
    assert "format = e8m3" in program  # the significant bits of operands
    assert "format = e8m2" in program  # and of cotangents


def test_the_loss_sees_compute_dtypes_and_gradients_have_them():
    seen, of_gradients, outputs = [], set(), []

    @jax.custom_vjp
    def spy(params):
        return params

    def backward(_, grad):
        of_gradients.add(str(grad.dtype))
        return (grad,)

    spy.defvjp(lambda params: (params, None), backward)

    def loss_fn(params, batch, key):
        seen.append(jax.tree.map(lambda x: (str(x.dtype), x.shape), (params, batch)))
        assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        return logistic_loss(jax.tree.map(spy, params), batch)

    trainer = make_trainer(loss_fn, policy="mixed_bfloat16", uses_prng_key=True)
    more = {
        "image": np.zeros((NUM_EXAMPLES, 2), np.uint8),
        "double": np.zeros((NUM_EXAMPLES, 1, 1), np.float64),
    }
    fit(trainer, DATA | more, stop_at=1, sensitive_callback=outputs.append)
    params = {"w": ("bfloat16", (3,)), "b": ("bfloat16", ())}
    batch = {
        "x": ("bfloat16", (1, 3)),
        "label": ("int32", (1,)),
        "image": ("uint8", (1, 2)),
        "double": ("bfloat16", (1, 1, 1)),
    }
    assert seen == [(params, batch)] * len(seen)
    assert seen
    assert of_gradients == {"bfloat16"}
    # Norms are float32 nonetheless.
    assert outputs[0].grad_norms.dtype == jnp.float32


def test_a_whole_run_is_compiled_once():
    loss_traces, step_traces = [], []

    def loss_fn(params, batch):
        loss_traces.append(None)
        return logistic_loss(params, batch)

    def pull_back(updates, start, params):
        step_traces.append(None)
        pulled = jax.tree.map(lambda u, s, p: u + (s - p), updates, start, params)
        return pulled, start

    # It keeps the initial parameters themselves, which are not to be used up.
    optimizer = optax.GradientTransformation(lambda params: params, pull_back)
    optimizer = optax.chain(optimizer, optax.sgd(0.1, momentum=0.9))
    trainer = make_trainer(loss_fn, optimizer, policy="mixed_bfloat16")
    counts = []
    for _ in range(2):
        fit(
            trainer,
            callback=lambda _: counts.append((len(loss_traces), len(step_traces))),
        )
    assert len(step_traces) == 1
    assert set(counts) == {counts[0]}


# The state.


def test_the_state_is_donated_and_initial_parameters_are_not():
    trainer, params = default_trainer(), jax.tree.map(jnp.array, PARAMS)
    state = trainer.init(params)
    with pytest.raises(ValueError, match="dataset must hold the 16 examples"):
        fit(trainer, {name: x[1:] for name, x in DATA.items()}, state=state)
    assert not state.params["w"].is_deleted()
    new_state = fit(trainer, state=state, stop_at=1)
    assert state.params["w"].is_deleted()
    assert not new_state.params["w"].is_deleted()
    assert same(params, PARAMS)
    fit(trainer, params=params, stop_at=1)


def loss_with_dropout(params, batch, key):
    keep = jax.random.bernoulli(key, 0.5, (1, 3))
    return logistic_loss(params, batch | {"x": jnp.where(keep, batch["x"], 0)})


def test_a_run_can_be_interrupted_after_any_step():
    fields = {"policy": "mixed_bfloat16", "uses_prng_key": True}
    fields |= {"method": "book_keeping", "microbatch_size": 2}
    # Two trainers, as in two processes.
    before, after = (make_trainer(loss_with_dropout, **fields) for _ in range(2))
    uninterrupted = fit(before)
    assert uninterrupted.step == 6
    for k in (0, 1, 3, 6):
        state = fit(before, stop_at=k)
        assert state.step == k
        saved = jax.tree.map(lambda x: jnp.array(np.array(x)), state)
        saved = saved._replace(spent=state.spent)
        assert same(fit(after, state=saved), uninterrupted)


def test_an_epoch_may_be_run_step_by_step():
    trainer = default_trainer()
    expected, loaded, state = fit(trainer), trainer.init(PARAMS), trainer.init(PARAMS)
    size = trainer.mechanism.padded_batch_size
    for indices in batches_of(trainer):
        loaded = trainer.train_step(loaded, trainer.load_batch(loaded, DATA))
        # Padding holds data here, to be ignored.
        padded = np.resize(np.append(indices, 0), size)
        batch = {name: x[padded] for name, x in DATA.items()}
        state = trainer.train_step(state, batch, np.arange(size) >= len(indices))
        assert isinstance(state, TrainingState)
    assert same(state, expected)
    assert same(loaded, expected)


# Randomness in the loss.


@pytest.mark.parametrize("key", [KEY, None], ids=["given", "fresh"])
def test_every_example_and_step_has_a_key_of_its_own(key, monkeypatch):
    fixed_tickets(monkeypatch)

    def loss_fn(params, batch, key):
        unused = 0 * (jnp.sum(params) + jnp.sum(batch["x"]))
        return unused + jax.random.uniform(key)

    trainer = make_trainer(
        loss_fn, uses_prng_key=True, expected_batch_size=NUM_EXAMPLES, prng_key=key
    )

    def values():
        outputs = []
        fit(
            trainer,
            params=jnp.zeros(2),
            sensitive_callback=lambda x: outputs.append(np.array(x.values)),
        )
        return np.array(outputs)

    first, second = values(), values()
    assert first.shape == (6, NUM_EXAMPLES)
    assert len(np.unique(first)) == first.size
    assert np.array_equal(first, second) == (key is not None)


# Data.


def test_a_source_is_asked_for_the_sampled_examples_alone():
    trainer, source = default_trainer(), RecordingSource(DATA)
    assert same(fit(trainer, source), fit(trainer))
    for request, indices in zip(source.batches, batches_of(trainer), strict=True):
        assert request.dtype == np.int64
        np.testing.assert_array_equal(request, indices)


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


@pytest.fixture(scope="module")
def traced_trainer():
    """A trainer, and a list with an entry for each trace of its loss."""
    traces = []

    def loss_fn(params, batch):
        traces.append(None)
        return logistic_loss(params, batch | {"x": batch["x"][:, :3]})

    # With this key, the first batches are not empty.
    trainer = make_trainer(loss_fn, prng_key=jax.random.key(0))
    fit(trainer, stop_at=1)
    return trainer, traces


@pytest.mark.parametrize("name", CHANGES_OF_A_BATCH)
def test_batches_that_differ_in_more_than_values_are_refused(traced_trainer, name):
    trainer, traces = traced_trainer
    source, num_traces = SourceThatVaries(DATA, CHANGES_OF_A_BATCH[name]), len(traces)
    for _ in range(2):  # a run that goes on is held to the same
        with pytest.raises(ValueError, match="same tree, shapes and dtypes") as error:
            fit(trainer, source)
        assert not any(x.isdigit() for x in str(error.value).split("dpmp:")[0])
    # So are batches that are not loaded.
    batch, is_padding = CHANGES_OF_A_BATCH[name](DATA), np.zeros(NUM_EXAMPLES, bool)
    message = r"all batches must have the same tree, shapes and dtypes.*Pad examples"
    with pytest.raises(ValueError, match=message):
        trainer.train_step(trainer.init(PARAMS), batch, is_padding)
    assert len(traces) == num_traces


def test_a_batch_that_cannot_be_traced_sets_no_standard():
    trainer = make_trainer()
    wrong = DATA | {"x": np.ones((NUM_EXAMPLES, 2), np.float32)}
    with pytest.raises(TypeError, match="dot_general"):
        fit(trainer, wrong, stop_at=1)
    assert fit(trainer, stop_at=1).step == 1


def test_a_loop_over_epochs_that_is_started_again_goes_on(tmp_path):
    trainer, warned = default_trainer(), pytest.warns(match="Nothing was trained")
    saved = fit(trainer, stop_at=3, checkpoint_dir=tmp_path)
    state = trainer.init(PARAMS)
    for stop_at in (1, 2):
        with warned:
            state = trainer.fit(
                state, DATA, stop_at=stop_at, checkpoint_dir=tmp_path, progress=False
            )
        assert state.step == 3
        assert same(state.params, saved.params)
    with warned:  # without a directory, too
        assert trainer.fit(state, DATA, stop_at=0, progress=False).step == 3


def test_a_step_is_compiled_even_where_jit_is_disabled():
    expected = fit(default_trainer(), stop_at=2).params
    with jax.disable_jit():
        assert same(fit(make_trainer(), stop_at=2).params, expected)


# What the loss closes over.


@pytest.mark.parametrize("make_array", [jnp.asarray, np.asarray])
def test_what_the_loss_closes_over_is_an_argument_of_the_program(make_array):
    rng = np.random.default_rng(0)
    frozen = make_array(rng.normal(size=(2**18, 4)).astype(np.float32))  # 4 MB

    def apply(params):
        return jnp.sum(jnp.sin(frozen) * params)

    def loss_fn(params, batch):
        total = apply(params) + jax.jit(apply)(params) + jax.checkpoint(apply)(params)
        return total + 0 * jnp.sum(batch["x"])

    trainer = make_trainer(loss_fn)
    state = trainer.init(jnp.zeros(4))
    _, constants = trainer._step.make_program(state._replace(spent=None), DATA)
    assert sum(x.nbytes for x in constants if x.size > 1) == frozen.nbytes
    assert len(trainer.lower(state, DATA).as_text()) < 1e6


# What comes out.


def test_the_sensitive_callback_sees_losses_and_norms_before_clipping():
    trainer, outputs = default_trainer(), []
    fit(trainer, stop_at=1, sensitive_callback=outputs.append)
    (sensitive,) = outputs
    assert isinstance(sensitive, SensitiveOutputs)
    indices = batches_of(trainer)[0]
    is_padding = np.arange(NUM_EXAMPLES) >= len(indices)
    np.testing.assert_array_equal(sensitive.is_padding_example, is_padding)
    assert 0 < len(indices) < NUM_EXAMPLES
    examples = {name: x[indices][:, None] for name, x in DATA.items()}
    value_and_grad = jax.vmap(jax.value_and_grad(logistic_loss), (None, 0))
    values, grads = value_and_grad(PARAMS, examples)
    norms = np.hypot(np.linalg.norm(grads["w"], axis=1), grads["b"])
    assert max(norms) > 1.2 * trainer.mechanism.l2_clip_norm
    # Some ten roundings of numbers of order one.
    for found, expected in ((sensitive.values, values), (sensitive.grad_norms, norms)):
        expected = np.pad(expected, (0, is_padding.sum()))
        np.testing.assert_allclose(found, expected, rtol=0, atol=20 * EPS)
        np.testing.assert_array_equal(found[is_padding], 0)


def test_debug_flags_show_nothing_of_an_example():
    x = DATA["x"].copy()
    x[3], x[4] = np.nan, np.inf
    trainer = make_trainer(expected_batch_size=NUM_EXAMPLES)  # every example is drawn
    with jax.debug_nans(True), jax.debug_infs(True):
        state = fit(trainer, DATA | {"x": x}, stop_at=1)
    assert np.all(np.isfinite(state.params["w"]))
    assert np.isfinite(state.metrics["overflowed"])
