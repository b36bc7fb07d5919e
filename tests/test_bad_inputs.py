"""Bad inputs to the public API: what each is told, and what it never shows.

Every message names what is required, what was given and what to do. It comes before the
function of the user is traced, and shows no value of the data and no key.
"""

import functools
import pathlib
import re
import types
from functools import partial

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas
import pytest

import dpmp
from dpmp import (
    GridArray,
    accounting,
    audit,
    batch_selection,
    lora,
    loss_scaling,
    planning,
    strategies,
)
from dpmp.__main__ import main
from dpmp.engines.book_keeping import measure_condition_numbers, summarize
from dpmp.loss_scaling import ScaledLoss
from dpmp.noise_addition import gaussian_privatizer
from dpmp.numerics import ExactSums
from dpmp.planning.memory import compiled_memory, estimate_memory

SECRET = 12345.678
SIZE = 16
DATA = {"x": np.full((SIZE, 3), SECRET, np.float32), "y": np.ones(SIZE, np.float32)}
BATCH = np.full((4, 3), SECRET, np.float32)
PARAMS = {"w": np.ones(3, np.float32)}
FLOATS, INTEGERS = np.ones(3, np.float32), np.ones(3, np.int32)
NO_PADDING = np.zeros(SIZE, bool)
KEY = jax.random.key(12345678)
FIELDS = {
    "num_examples": SIZE,
    "expected_batch_size": 4,
    "iterations": 2,
    "l2_clip_norm": 1.0,
    "noise_multiplier": 1.0,
}
FIELDS_OF_EPOCHS = {x: FIELDS[x] for x in FIELDS if x != "iterations"}
UNCALIBRATED = {"noise_multiplier": None}
RESCALED = {"rescale_to_unit_norm": True}
BOOK_KEEPING = {"method": "book_keeping"}
ADD_OR_REMOVE = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
CALLS = []


def loss_fn(params, batch):
    CALLS.append("traced")
    return jnp.mean(batch["x"] @ params["w"] - batch["y"])


def linear(w, x):
    CALLS.append("traced")
    return jnp.mean(x @ w)


# The callables of the table, with arguments that are good, apart from those given.

dpsgd = partial(dpmp.DPSGD, **FIELDS)
# With this key, the first batch has several examples.
OPTIONS = {"policy": "float32", "optimizer": optax.sgd(0.1)}
trainer = partial(
    dpmp.DPTrainer, mechanism=dpsgd(), loss_fn=loss_fn, prng_key=KEY, **OPTIONS
)


@functools.cache
def good_trainer():
    return trainer()


@functools.cache
def state():
    return good_trainer().init(PARAMS)


def at_step(number):
    return state()._replace(step=np.int32(number))


def init(params):
    return good_trainer().init(params)


def fit(data=DATA, given=None, **options):
    given = state() if given is None else given
    return good_trainer().fit(given, data, **{"progress": False} | options)


def fit_from(**fields):
    return fit(given=state()._replace(**fields))


def train_step(given=None, batch=DATA, mask=NO_PADDING):
    given = state() if given is None else given
    return good_trainer().train_step(given, batch, mask)


def clip(*args, is_padding_example=None, **options):
    fun = dpmp.clipped_grad(linear, **{"l2_clip_norm": 1.0} | options)
    return fun(*(args or (FLOATS, BATCH)), is_padding_example=is_padding_example)


def clip_outputs(**options):
    return dpmp.clipped_fun(lambda x: x, **{"l2_clip_norm": 1.0} | options)(BATCH)


clip_pytree = partial(dpmp.clip_pytree, pytree=BATCH, clip_norm=1.0)


def exact_sum():
    return GridArray(jnp.full(3, 12345, jnp.int32), 1.0)


def sampled(step=0, num_examples=8, key=7, **fields):
    fields = {"sampling_prob": 0.5, "iterations": 2, "truncated_batch_size": 8} | fields
    sampling = batch_selection.PoissonSampling(**fields)
    return sampling.indices(step, num_examples=num_examples, key=key)


padded = partial(batch_selection.pad_indices, batch_size=3)
policy = partial(dpmp.Policy, param_dtype="float32", compute_dtype="bfloat16")
privatizer = partial(gaussian_privatizer, stddev=1.0)
report = partial(dpmp.precision_report, linear, BATCH)
DPSGD_EVENT = {"noise_multiplier": 1.0, "iterations": 2, "sampling_prob": 0.5}
event = partial(accounting.dpsgd_event, **DPSGD_EVENT)
TRUNCATION = {"num_examples": 8, "sampling_prob": 0.5, "truncated_batch_size": 4}
truncated_event = partial(accounting.truncated_dpsgd_event, **DPSGD_EVENT | TRUNCATION)
truncation_probability = partial(accounting.truncation_probability, **TRUNCATION)
epsilon = partial(accounting.get_epsilon, event=dpsgd().dp_event, delta=1e-5)
LAPLACE, GAUSSIAN = dp_accounting.LaplaceDpEvent(1.0), dp_accounting.GaussianDpEvent(1)
# A range is checked before any event is made: this event would be refused.
least_noise = partial(
    accounting.calibrate_noise_multiplier, make_event=float, epsilon=0.1, delta=1e-5
)
calibrated = partial(dpsgd().calibrate, epsilon=1.0, delta=1e-5)


def guarantee(step=None, **fields):
    return dpsgd(**{"delta": 1e-5} | fields).guarantee(step)


canaries = partial(audit.canaries, mechanism=dpsgd(delta=1e-5))
memorization = partial(
    audit.memorization, np.ones(64), is_in=np.arange(64) % 2 == 0, delta=1e-5
)
metrics = dpmp.ReleasedMetrics(fraction_clipped=True)
adaptive = partial(dpmp.AdaptiveClipNorm, initial=1.0)
ADAPTIVE = adaptive()
plans = partial(
    planning.compare_batch_sizes,
    num_examples=5000,
    num_processed=20_000,
    epsilon=1.0,
    delta=1e-5,
)
estimated = partial(estimate_memory, FLOATS, BATCH, **OPTIONS)
compiled = partial(compiled_memory, linear, FLOATS, BATCH, **OPTIONS)


KERAS_VARIABLE = types.SimpleNamespace(ndim=2, shape=(3, 2), dtype="float32")


def adapters(targets="kernel", **options):
    params = {"kernel": jnp.full((3, 2), SECRET)}
    return lora.init(KEY, params, **{"rank": 2, "targets": targets} | options)


def adapters_of(fun):
    return adapters(fun=fun, example_args=(BATCH,))


def trained():
    return jax.tree.map(lambda x: x + 1, adapters())


def sharding(*axes, x="model"):
    types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 1), ("data", x), axis_types=types)
    return jax.NamedSharding(mesh, jax.P(*axes))


def with_key(w, x, key):
    return linear(w, x) * jax.random.uniform(key)


def draw_twice():
    search = planning.BestOfRuns(mechanism=dpsgd(), expected_runs=5)
    return [search.draw(["a", "b"]) for _ in range(2)]


class Broken:
    """A source that returns one row for any array of indices."""

    def __len__(self):
        return SIZE

    def __getitem__(self, indices):
        return {name: x[: len(indices) and 1] for name, x in DATA.items()}


class Singles:
    """A source of single examples, the seventh of which has another `x`."""

    def __init__(self, change):
        self.change = change

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        example = {name: x[int(index)] for name, x in DATA.items()}
        return example | ({"x": self.change(example["x"])} if index == 7 else {})


TWO_KINDS_OF_NAMES = pandas.DataFrame(DATA["x"]).assign(y=DATA["y"])

# By callable: an argument and values that it must not have. Where the message does not
# begin with the argument, its beginning comes first. Several arguments are a dict.
TABLE = {
    trainer: [
        ("mechanism", None),
        ("optimizer", "adam", optax.adam, optax.MultiSteps(optax.sgd(0.1), 2)),
        ("policy", "bf16", jnp.bfloat16),
        ("loss_fn", None, lambda params, batch, key: 0.0),
        ("loss_fn must be", {"uses_prng_key": True}),
        ("loss_fn must be without a scale", "loss_fn", ScaledLoss(loss_fn, 2.0)),
        ("loss_scale", 3.0, "dynamic", loss_scaling.by_loss, loss_scaling.DynamicScale),
        ("loss_scale must be a function of", "loss_scale", lambda: 1.0),
        ("uses_prng_key", "no", 1),
        ("prng_key", 12345678, jax.random.PRNGKey(1), jax.random.split(KEY)),
    ],
    init: [
        ("params", {}),
        ("every dict in params must", "params", {0: FLOATS, "w": FLOATS}),
        (
            "every leaf of params must",
            "params",
            {"w": INTEGERS},
            {"w": FLOATS, "f": jax.nn.relu},
            {"w": np.array([1.0, None], object)},
            {"w": np.ones(3, np.complex64)},
        ),
        ("params must be finite", "params", {"w": np.array([1.0, np.nan], "float32")}),
        (
            "params must be arrays",
            "params",
            {"w": jax.ShapeDtypeStruct((3,), jnp.float32)},
        ),
        (
            "all params must be sharded over one",
            "params",
            {name: jax.device_put(FLOATS, sharding(name, x=name)) for name in "ab"},
        ),
    ],
    fit: [
        ("state must be", "given", PARAMS),
        ("progress", "no"),
        ("checkpoint_dir", 3, "", "s3://runs/1", "a\x00b", "\ud800"),
        ("stop_at", 3, -1, 1.5),
        ("callback", 3, "print"),
        ("callback must be a function of (state)", "callback", lambda: None, dict.get),
        ("sensitive_callback", "print"),
        ("prefetch", -1, 1.5, None, True),
        ("every", 0),
        ("keep", 0),
        ("epsilon_budget", -1.0, "8"),
        ("a budget needs a directory", "epsilon_budget", 8.0),
        ("batch_sharding must be a", "batch_sharding", "data", jax.P("data")),
        (
            "batch_sharding must divide",
            "batch_sharding",
            sharding(None, "data"),
            sharding("data", "model"),
        ),
        (
            "the dataset must",
            "data",
            None,
            "x" * SIZE,
            {"x": DATA["x"][:3], "y": DATA["y"]},
            {name: x[:8] for name, x in DATA.items()},
            iter(DATA["x"]),
            Broken,
            pathlib.Path("data.npz"),
        ),
        (
            "examples must be numbers",
            "data",
            {"x": [str(SECRET)] * SIZE},
            {"x": jax.random.split(KEY, SIZE)},
            {"x": [[SECRET]] * 8 + [[SECRET, 1.0]] * 8},
        ),
        ("the dataset must be of one type", "data", TWO_KINDS_OF_NAMES),
        ("the source must", "data", Broken()),
    ],
    fit_from: [
        ("state.spent must be", "spent", np.zeros((1, 22), np.uint32)),
        ("state.step must", "step", np.zeros(2, int), np.int32(-1)),
    ],
    dpmp.check_source: [
        ("the dataset must", "source", None),
        ("the source must", "source", Broken()),
        ("every record must have", "source", Singles(lambda x: x[:2])),
        ("every record must load", "source", Singles(lambda x: str(SECRET))),
    ],
    train_step: [
        ("state must be", "given", PARAMS),
        ("every batch must", "mask", np.zeros(3, bool)),
        (
            "is_padding_example must be",
            "mask",
            None,
            *(np.zeros(SIZE, x) for x in ("float32", "int32", "uint8")),
        ),
    ],
    dpsgd: [
        ("num_examples", 0, 16.5),
        ("expected_batch_size", 0, np.nan, 17, 0.5),
        ("iterations", 0, True),
        ("every l2_clip_norm must", "l2_clip_norm", -1.0, 0, np.nan, "1"),
        ("l2_clip_norm", None),
        ("clip norms and normalize_by must", "l2_clip_norm", 1e-30),
        ("noise_multiplier", -1.0, np.inf),
        ("rescale_to_unit_norm", "yes", 0),
        ("released_metrics", {}, dpmp.ReleasedMetrics),
        ("delta", 0.0, 1),
        ("truncated_batch_size", 0),
        ("microbatch_size", 0, 2.5),
        ("arithmetic", "float16"),
        (
            '"bounded" sums must',
            {"arithmetic": "bounded", "method": "per_example"},
            BOOK_KEEPING | {"neighboring_relation": ADD_OR_REMOVE},
        ),
        ('"exact" sums must', BOOK_KEEPING | {"arithmetic": "exact"}),
        ("method", "ghost"),
        ("num_parameters", 0),
        ("sampling_prob", 1.5),
        ("neighboring_relation", "zero-out"),
        (
            "fraction_clipped needs",
            {
                "l2_clip_norm": dpmp.AutomaticClipping(),
                "released_metrics": dpmp.ReleasedMetrics(fraction_clipped=True),
            },
        ),
    ],
    calibrated: [("epsilon", 0, np.inf), ("delta", 2, 0.0, np.nan, None)],
    guarantee: [
        ("step", 3, -1, 1.5),
        ("delta", "1e-5", np.nan, None),
        ("the mechanism must", UNCALIBRATED),
    ],
    dpmp.ReleasedMetrics: [
        ("at least one metric must", {}),
        ("largest_loss", 0.0),
        ("fraction_clipped", "yes", 1),
        ("norm_share must be", {"fraction_clipped": True, "norm_share": -1.0}),
    ],
    dpmp.AutomaticClipping: [("stability", 0.0, "0.1", 1e-30)],
    adaptive: [
        ("initial", 0.0, np.nan, {"w": 1.0}),
        ("quantile", 0, 1.0),
        ("learning_rate", -1),
        ("norm_share", np.inf),
        ("clip norms must satisfy", {"highest": 0.5}, {"lowest": 1e-30}),
    ],
    metrics.stddev: [
        (
            "name must be",
            {"name": "norm", "noise_multiplier": 1.0, "expected_batch_size": 4},
        )
    ],
    clip: [
        ("every l2_clip_norm must", "l2_clip_norm", 0.0, -1.0, {"a": 1.0, "b": 0.0}),
        ("every l2_clip_norm must", "l2_clip_norm", [dpmp.AutomaticClipping()]),
        ("every l2_clip_norm must", RESCALED | {"l2_clip_norm": np.inf}),
        ("l2_clip_norm", {}, {"v": 1.0}),
        ("an AdaptiveClipNorm needs", "l2_clip_norm", ADAPTIVE),
        (
            "released_metrics and AdaptiveClipNorm must",
            RESCALED | {"nan_safe": False, "l2_clip_norm": ADAPTIVE},
            {
                "nan_safe": False,
                "released_metrics": dpmp.ReleasedMetrics(fraction_overflowed=True),
            },
        ),
        ("rescale_to_unit_norm", "yes"),
        ("return_values", "no"),
        ("return_grad_norms", "no"),
        ("keep_batch_dim", 1),
        ("has_aux", "no"),
        ("nan_safe", None),
        ("released_metrics", "loss"),
        ("normalize_by", 0.0),
        ("argnums", -1),
        ("argnums, batch_argnums and prng_argnum must", "argnums", 1),
        ("microbatch_size must divide the", "microbatch_size", 3),
        ("method", "fast"),
        ("arithmetic", "double"),
        ("dtype must be float32", "dtype", "bfloat16", "exact"),
        ("dtype must be float32", {"dtype": {"x": 1}, "arithmetic": "float32"}),
        ("resolution must be", {"arithmetic": ExactSums(0)}),
        (
            '"exact" and "bounded" sums need',
            {"l2_clip_norm": np.inf, "arithmetic": "exact"},
        ),
        ("float64 sums need", "arithmetic", "float64"),
        (
            "pre_clipping_transform needs an engine",
            BOOK_KEEPING | {"pre_clipping_transform": abs},
        ),
        ("is_padding_example", np.zeros(4, int)),
        ("all batched arguments must", "is_padding_example", np.zeros(3, bool)),
    ],
    clip_outputs: [
        ("every l2_clip_norm must", "l2_clip_norm", -1.0, 0.0, ADAPTIVE),
        ("rescale_to_unit_norm", "yes"),
        ("return_norms", "no"),
        ("microbatch_size must divide the", "microbatch_size", 3),
        ("batch_argnums", "x"),
        ('"bounded" sums must', "arithmetic", "bounded"),
    ],
    clip_pytree: [
        ("every l2_clip_norm must", "clip_norm", -1.0, 0.0),
        ("l2_clip_norm must be", {"pytree": {"a": BATCH}, "clip_norm": {"b": 1.0}}),
        ("every leaf of pytree must", "pytree", INTEGERS),
        ("return_zero", 2),
    ],
    privatizer: [
        ("stddev", -1.0, np.nan, "1"),
        ("l2_sensitivity", -1.0),
        ("prng_key", 12345678),
    ],
    sampled: [
        ("sampling_prob", 0.0, 2.0),
        ("iterations", 0),
        ("truncated_batch_size", 0),
        ("step", 2, -1, 1.0),
        ("num_examples", 0, 2**63),
        ("key", -12345678, 2**128, 12345.5, "12345", KEY),
    ],
    padded: [
        ("batch_size must be", "indices", np.arange(12345, 12350)),
        (
            "indices",
            np.array([12345.0, 12345.5]),
            np.full((1, 2), 12345),
            np.array([12345], np.uint64),
        ),
    ],
    policy: [
        ("param_dtype must be float32", "param_dtype", "float16"),
        ("compute_dtype", "int8", "bf16", "float8_e4m3fn"),
        ("matmul_precision", "fast"),
        ("float32_paths", "norm", 3),
        ("every entry of float32_paths must", "float32_paths", ("norm", "layers.(")),
        ("products must be a format", "products", 3.0),
        ("format must be one of", "products", "int7"),
        ("format must be one of", "products", {"w": "float32"}),
        ("an expression in products must be a valid", "products", {"(": "int8"}),
        ("a rule must be a pair", "products", [3.0]),
        ("rounded_share must be in", "rounded_share", 0.0),
        ("rounded_share must be 1", "rounded_share", 0.5),
    ],
    dpmp.Policy.from_name: [("policy must be", "name", "fp16")],
    dpmp.autocast: [
        ("fun", None),
        (
            "policy must be",
            *[{"fun": linear, "policy": x} for x in ("half", jnp.bfloat16)],
        ),
    ],
    partial(ScaledLoss, linear): [
        ("loss_scale", 3.0, 0.0, -1.0, 2.0**41, np.inf, np.nan, "2"),
        ("a dynamic loss_scale must", "loss_scale", loss_scaling.DynamicScale()),
    ],
    report: [("policy", "half"), ("loss_scale", 3.0)],
    loss_scaling.by_loss: [
        ("target", 0.0),
        ("the largest scale must", "largest", 2.0**50),
    ],
    loss_scaling.DynamicScale: [
        ("growth_interval", 0),
        ("tolerated", -1.0),
        ("loss_scale must be", "initial", 3.0),
    ],
    event: [
        ("noise_multiplier", -1.0, np.inf),
        ("iterations", 1.5, -1),
        ("sampling_prob", 0.0, 1.1),
    ],
    truncated_event: [
        (f"{name} must be", name, -1) for name in DPSGD_EVENT | TRUNCATION
    ],
    truncation_probability: [(f"{name} must be", name, -1) for name in TRUNCATION],
    partial(accounting.choose_truncated_batch_size, 8, 0.5): [("multiple_of", 0)],
    epsilon: [
        ("event", None, 3, "dpsgd", LAPLACE, dp_accounting.UnsupportedDpEvent()),
        ("event", dp_accounting.PoissonSampledDpEvent(0.1, LAPLACE)),
        ("noise_multiplier must", "event", dp_accounting.GaussianDpEvent(-1.0)),
        (
            "sampling_prob must",
            "event",
            dp_accounting.PoissonSampledDpEvent(1.5, GAUSSIAN),
        ),
        ("delta", 0.0, 1.0, np.nan, None),
        ("neighboring_relation", "add", "ADD_OR_REMOVE_ONE"),
    ],
    least_noise: [
        ("epsilon", 0.0, np.inf, np.nan),
        ("delta", 1.0),
        ("neighboring_relation", None),
        ("make_event", 3, GAUSSIAN),
        ("event must be made", "make_event", float),
        (
            "the target must be within reach",
            "make_event",
            lambda _: dp_accounting.NonPrivateDpEvent(),
            lambda _: GAUSSIAN,
        ),
    ],
    adapters: [
        ("at least one array must", "targets", "kernal"),
        ("a selection must be", "targets", "(", None, str.isupper, re.compile("k")),
        ("rank", 0),
    ],
    adapters_of: [
        ("the function must multiply with", "fun", lambda params, x: jnp.sum(x)),
        (
            "every target of LoRA must",
            "fun",
            lambda params, x: jnp.convolve(x[0], params["kernel"][0]).sum(),
        ),
    ],
    plans: [
        ("epsilon", 0.0),
        ("delta", 1.0),
        ("num_processed", 0),
        ("there must be 32", "num_examples", 20),
        ("sizes", 64),
    ],
    planning.plan_to_start_from: [("there must be a plan", "plans", [])],
    partial(planning.compare_noise, epsilon=1.0, delta=1e-5): [("mechanism", None)],
    canaries: [
        ("seed", -1),
        ("confidence", 99),
        ("num_canaries", 0),
        ("mechanism", None),
    ],
    memorization: [("claimed", -1), ("losses must be", "is_in", np.arange(64) % 2)],
    strategies.banded_toeplitz: [("bands must be", {"bands": 8, "iterations": 4})],
    estimated: [
        ("policy", "half"),
        ("method", "ghost"),
        ("arithmetic", "half"),
        ('"exact" sums must be used with', BOOK_KEEPING | {"arithmetic": "exact"}),
        ("microbatch_size must divide the", "microbatch_size", 3),
        ("microbatch_size must be", "microbatch_size", 0),
    ],
    partial(estimate_memory, **OPTIONS): [
        ("params and batch must be", {"params": x, "batch": BATCH})
        for x in (None, 10**9, {"w": "a text"})
    ],
    compiled: [
        ("microbatch_size must divide the", "microbatch_size", 3),
        ('"exact" sums must be used with', BOOK_KEEPING | {"arithmetic": "exact"}),
        ("method", "ghost"),
    ],
    dpmp.devices.measure_dtypes: [("size", 0)],
    partial(measure_condition_numbers, linear, FLOATS, BATCH): [("microbatch_size", 0)],
    partial(summarize, linear, FLOATS, BATCH): [
        ("argnums, batch_argnums and prng_argnum must", "argnums", 1),
        ('"exact" sums must', "arithmetic", "exact"),
    ],
}

# Other calls, by how the message begins.
CALLED = {
    "an array as loss_scale must": [lambda: trainer(loss_scale=jnp.ones(2))],
    "the mechanism must": [
        lambda: trainer(mechanism=dpsgd(**UNCALIBRATED)).fit(state(), DATA),
        lambda: dpsgd(**UNCALIBRATED).statement(),
        lambda: dpsgd(**UNCALIBRATED).privatizer(KEY),
        lambda: dpsgd(**UNCALIBRATED).dp_event,
    ],
    "state must be": [
        lambda: good_trainer().guarantee(PARAMS, delta=0.1),
        lambda: good_trainer().load_batch(PARAMS, DATA),
        lambda: good_trainer().lower(PARAMS, DATA),
    ],
    "delta must be": [lambda: good_trainer().guarantee(state())],
    "state.spent must be": [
        lambda: good_trainer().guarantee(state()._replace(spent=None), delta=0.1)
    ],
    "the dataset must": [lambda: good_trainer().load_batch(state(), None)],
    "a batch must be drawn": [
        lambda: train_step(at_step(1), good_trainer().load_batch(state(), DATA), None)
    ],
    "is_padding_example must be left out": [
        lambda: train_step(state(), good_trainer().load_batch(state(), DATA))
    ],
    "step must be below": [lambda: train_step(at_step(2))],
    "epochs must be": [lambda: dpmp.DPSGD.from_epochs(epochs=0, **FIELDS_OF_EPOCHS)],
    "mechanism must be": [lambda: audit.batches(None)],
    "trainer must be": [lambda: audit.replay(None, PARAMS, DATA)],
    "names must be a function": [
        lambda: lora.save("unused", trained(), PARAMS, initial=None, names={"q": "q"})
    ],
    "config must be": [
        lambda: lora.save("unused", trained(), PARAMS, initial=None, config={"r": 3})
    ],
    "example_args must be": [lambda: adapters(fun=linear)],
    "pre_clipping_transform must be a function": [
        lambda: clip(pre_clipping_transform=3)
    ],
    "optimizer must be": [
        lambda: estimate_memory(FLOATS, BATCH, policy="float32", optimizer=optax.adam)
    ],
    "the number of steps must follow from epochs": [
        lambda: dpmp.DPSGD.from_epochs(epochs=3, **FIELDS)
    ],
    "a search must draw its runs once": [lambda: draw_twice()],
    "key must be one key of jax": [
        lambda: lora.init(0, {"kernel": np.ones((3, 2))}, 2, "kernel")
    ],
    "the argument at prng_argnum must be one key": [
        lambda: dpmp.clipped_grad(with_key, l2_clip_norm=1.0, prng_argnum=2)(
            FLOATS, BATCH, 12345
        )
    ],
    "parameters and batch must be arrays": [
        lambda: dpmp.compare_policies(
            linear,
            FLOATS,
            jax.ShapeDtypeStruct((8, 3), jnp.float32),
            mechanism=dpsgd(),
            optimizer=optax.sgd(0.1),
        )
    ],
    "the state must have the arrays that this": [
        lambda: trainer(
            policy=dpmp.Policy(jnp.bfloat16, jnp.bfloat16, stochastic_rounding=True)
        ).fit(trainer().init(PARAMS), DATA)
    ],
    "candidates must be": [
        lambda: planning.BestOfRuns(mechanism=dpsgd(), expected_runs=5).draw("adam")
    ],
    "the mechanism must decide": [
        lambda: dpsgd().clipped_grad(linear, l2_clip_norm=2.0),
        lambda: dpsgd().clipped_grad(linear, normalize_by=1.0),
    ],
    "the mechanism must clip": [
        lambda: dpsgd().without_privacy().calibrate(epsilon=1.0, delta=1e-5)
    ],
    "the sum must have the sensitivity": [
        lambda: dpsgd().privatizer(KEY).update(exact_sum(), None),
        lambda: dpsgd().privatizer(KEY).update(FLOATS, None),
    ],
    "noise_state must be": [lambda: privatizer(prng_key=KEY).update(FLOATS, {})],
    "spmd_axis_name must": [lambda: clip(spmd_axis_name=1)],
    "a mechanism must": [lambda: dpsgd().clipped_grad(linear, nan_safe=False)],
    "the gradient must": [
        lambda: dpsgd(num_parameters=2).privatizer(KEY).update(FLOATS, None)
    ],
    "a traced l2_clip_norm must": [
        lambda: jax.jit(lambda x: clip(l2_clip_norm=ADAPTIVE.at(x), **RESCALED))(FLOATS)
    ],
    "a traced l2_clip_norm needs a": [
        lambda: jax.jit(lambda x: clip(l2_clip_norm=x))(1.0)
    ],
    "clip_norm must be given": [
        lambda: dpsgd(l2_clip_norm=ADAPTIVE).clipped_grad(linear),
        lambda: dpsgd(l2_clip_norm=ADAPTIVE).split(FLOATS),
        lambda: dpsgd().clipped_grad(linear, clip_norm=1.0),
    ],
    "there must be": [lambda: clip(FLOATS), lambda: dpmp.precision_report(linear)],
    "every leaf of argument 0 must": [lambda: clip(INTEGERS, BATCH)],
    "argument 0 must": [lambda: clip({}, BATCH)],
    "all batched arguments must": [
        lambda: estimate_memory(FLOATS, [BATCH, BATCH[:2]], **OPTIONS),
        lambda: compiled_memory(linear, FLOATS, [BATCH, BATCH[:2]], **OPTIONS),
        lambda: clip(FLOATS, (BATCH, BATCH[:2])),
    ],
    "neighboring_relation must be": [
        lambda: dpmp.clipped_grad(linear, l2_clip_norm=1.0).sensitivity("add")
    ],
    "a sum of clipped gradients must": [
        lambda: optax.apply_updates(FLOATS, exact_sum()),
        lambda: exact_sum() / 4,
    ],
    "every leaf of sum_of_clipped_grads must": [
        lambda: privatizer(prng_key=KEY).update(INTEGERS, None)
    ],
    "every expression in float32_paths must": [
        lambda: policy(float32_paths=("norm",)).cast_to_compute(PARAMS)
    ],
    "fun must be": [lambda: dpmp.precision_report(None, FLOATS)],
    "pre_clipping_transform must be given": [
        lambda: dpmp.clipped_grad(
            ScaledLoss(linear, 2.0), l2_clip_norm=1.0, pre_clipping_transform=abs
        )
    ],
    "sampling_prob must be": [lambda: accounting.choose_truncated_batch_size(8, 0.0)],
    "num_examples must be": [lambda: accounting.choose_truncated_batch_size(0, 0.5)],
    "adapters must come from": [
        lambda: lora.apply(linear, PARAMS)(PARAMS, BATCH),
        lambda: lora.apply(linear, PARAMS)(None, BATCH),
        lambda: lora.merge(PARAMS, None),
        lambda: lora.save("unused", None, PARAMS, initial=None),
        lambda: lora.check_trained(None, initial=adapters(), params=PARAMS),
        lambda: lora.check_trained(trained(), initial=None, params=PARAMS),
    ],
    "params must be": [
        lambda: lora.init(KEY, None, 2, "kernel"),
        lambda: lora.apply(linear, None),
        lambda: lora.merge(None, adapters()),
        lambda: lora.save("unused", trained(), None, initial=None),
        lambda: lora.load("unused", None),
        lambda: lora.check_trained(trained(), initial=adapters(), params=None),
        lambda: adapters().for_base(None),
        lambda: lora.partition(None, "kernel"),
    ],
    "every target of LoRA must be an array": [
        lambda: lora.init(KEY, {"kernel": KERAS_VARIABLE}, 2, "kernel"),
        lambda: lora.init(KEY, {"kernel": 1.0}, 2, "kernel"),
    ],
    "both parts of the parameters must": [
        lambda: lora.combine(PARAMS, None),
        lambda: lora.combine(None, PARAMS),
    ],
}
CASES = [(required, call) for required, calls in CALLED.items() for call in calls]
for call, rows in TABLE.items():
    for first, *others in rows:
        row = [first, *others] if " " in first else [f"{first} must", first, *others]
        required, name, *values = row
        is_name = isinstance(name, str)
        options = [{name: x} for x in values] if is_name else [name, *values]
        CASES += [(required, partial(call, **x)) for x in options]

# What is required; what was given; one or more sentences with the fix.
_THREE_PARTS = re.compile(
    r"^(?=.*\b(must|need|needs|may)\b).+; got .+[\w)'\"\]}>]\. [A-Z`].*\.\)?$",
    re.DOTALL,
)


@pytest.mark.parametrize(("required", "call"), CASES)
def test_a_bad_input_is_told_what_is_required_what_was_given_and_what_to_do(
    required, call
):
    CALLS.clear()
    with pytest.raises((ValueError, TypeError), match=re.escape(required)) as caught:
        call()
    assert not CALLS
    message = str(caught.value)
    assert _THREE_PARTS.match(message), message
    told = "\n".join([message, *getattr(caught.value, "__notes__", ())])
    assert "12345" not in told


RUN = ["--num-examples", "5000", "--batch-size", "50", "--steps", "20"]
EPSILON = ["epsilon", *RUN, "--noise-multiplier", "1", "--delta", "1e-5"]
CALIBRATE = ["calibrate", *RUN, "--epsilon", "1", "--delta", "1e-5"]
STATEMENT = ["statement", *CALIBRATE[1:]]
PLAN = ["plan", "--num-examples", "99", "--processed", "99", *CALIBRATE[-4:]]
# The last value of a flag counts.
COMMANDS = {
    "noise_multiplier must": [*EPSILON, "--noise-multiplier", "-1"],
    "iterations must": [*CALIBRATE, "--steps", "0"],
    "every l2_clip_norm must": [*STATEMENT, "--clip-norm", "-1"],
    "there must be 32 examples": [*PLAN, "--num-examples", "20"],
    "must come with it; got rank=8": [*PLAN, "--rank", "8"],
    "size must": ["devices", "--size", "0"],
}


def test_an_optimizer_with_a_line_search_is_refused():
    made = trainer(optimizer=optax.lbfgs())
    with pytest.raises(ValueError, match=r"optimizer\.update must be .*line search"):
        made.fit(made.init(PARAMS), DATA, progress=False)


def _mean_of_examples(grads, state, params=None):
    """As optax.contrib.dpsgd, which clips per-example gradients itself."""
    return jax.tree.map(lambda x: x / x.shape[0], grads), state


def test_an_error_of_an_optimizer_says_what_it_was_given():
    optimizer = optax.GradientTransformation(optax.init_empty_state, _mean_of_examples)
    made = trainer(optimizer=optimizer, loss_fn=lambda w, x: w * jnp.mean(x["x"]))
    with pytest.raises(IndexError) as caught:
        made.fit(made.init(np.zeros((), np.float32)), DATA, progress=False)
    assert "updates are one noisy mean gradient" in "".join(caught.value.__notes__)


def test_a_private_number_of_examples_is_not_shown():
    options = {"sampling_prob": 0.25, "truncated_batch_size": SIZE}
    hidden = dpsgd(neighboring_relation=ADD_OR_REMOVE, **options)
    made = trainer(mechanism=hidden)
    short = {name: x[: SIZE - 3] for name, x in DATA.items()}
    with pytest.raises(ValueError, match="must hold the examples") as caught:
        made.fit(made.init(PARAMS), short, progress=False)
    assert not re.search(r"\d", str(caught.value))


def test_the_state_of_a_privatizer_shows_no_key():
    noise_state = privatizer(prng_key=KEY).init(FLOATS)
    words = np.asarray(jax.random.key_data(KEY)).tolist()
    assert not any(str(word) in repr((FLOATS, noise_state)) for word in words if word)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: 0.0,
        lambda x: jnp.sum(jax.lax.stop_gradient(x)),
        lambda x: jnp.sum(x > 0).astype(jnp.float32),
        lambda x: (0.9 * x, 0.0)[1],
    ],
    ids=["never read", "stopped", "compared", "dropped"],
)
def test_a_parameter_that_no_gradient_reaches_is_warned_of(use):
    def loss(params, batch):
        return jnp.mean(batch["x"] @ params["w"] - batch["y"]) + use(params["other"])

    made = trainer(loss_fn=loss)
    state = made.init({**PARAMS, "other": np.ones(2, np.float32)})
    with pytest.warns(UserWarning, match=r"reaches 1 of 2 .* as \['other'\]: it"):
        made.lower(state, DATA)


def test_policies_of_16_bits_are_warned_of_where_they_train_little():
    with pytest.warns(UserWarning, match="the policy rounds parameters"):
        trainer(loss_fn=dpmp.autocast(loss_fn), policy="mixed_bfloat16")
    with pytest.warns(UserWarning, match="Pass loss_scale="):
        trainer(policy="mixed_float16")


def test_a_folder_in_a_run_is_no_directory_for_another(tmp_path):
    fit(given=init(PARAMS), checkpoint_dir=tmp_path)
    for folder in ("checkpoints", "checkpoints/2"):
        message = "not a folder in it: the steps in the ledger"
        with pytest.raises(ValueError, match=message):
            fit(given=init(PARAMS), checkpoint_dir=tmp_path / folder)


def test_a_loss_that_closes_over_as_many_rows_as_examples_is_warned_of():
    data = jnp.ones((100, 3))

    def closed(params, batch):
        return jnp.mean(data @ params["w"]) * batch[0, 0]

    def trace(**fields):
        made = trainer(loss_fn=closed, mechanism=dpsgd(num_examples=100, **fields))
        made.lower(made.init(PARAMS), data[:32])

    with pytest.warns(UserWarning, match="closes over an array with 100 rows"):
        trace()
    trace(neighboring_relation=ADD_OR_REMOVE)  # the number of examples is private


@pytest.mark.parametrize("required", COMMANDS)
def test_a_bad_number_on_the_command_line_is_told_the_same(required, capsys):
    with pytest.raises(SystemExit) as caught:
        main(COMMANDS[required])
    assert caught.value.code == 2
    usage, _, message = capsys.readouterr().err.partition("error: ")
    assert usage.startswith(f"usage: python -m dpmp {COMMANDS[required][0]} [-h]")
    assert required in message
    assert _THREE_PARTS.match(message.strip()), message
