"""Bad inputs to the public API: what each is told, and what it never shows.

Every message names what is required, what was given and what to do. It comes before the
function of the user is traced, and shows no value of the data and no key.
"""

import re

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpmp
from dpmp import (
    GridArray,
    accounting,
    batch_selection,
    lora,
    loss_scaling,
    noise_addition,
    planning,
)
from dpmp.__main__ import main
from dpmp.engines.book_keeping import measure_extents, summarize
from dpmp.loss_scaling import ScaledLoss
from dpmp.numerics import ExactSums
from dpmp.tools.memory import (
    accumulation_overhead,
    compiled_memory,
    estimate_memory,
    measure_accumulation_share,
)
from dpmp.tools.microbatches import measure_microbatch_sizes

SECRET = 12345.678
SIZE = 16
DATA = {"x": np.full((SIZE, 3), SECRET, np.float32), "y": np.ones(SIZE, np.float32)}
BATCH = jnp.full((4, 3), SECRET)
PARAMS = {"w": jnp.ones(3)}
KEY = jax.random.key(12345678)
FIELDS = {
    "num_examples": SIZE,
    "expected_batch_size": 4,
    "iterations": 2,
    "l2_clip_norm": 1.0,
    "noise_multiplier": 1.0,
}
TARGET = {"epsilon": 1.0, "delta": 1e-5}
ADD_OR_REMOVE = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
CALLS = []
# What an exact sum of clipped gradients is made of.
TOTAL = GridArray(jnp.full(3, 12345, jnp.int32), 1.0)


def loss_fn(params, batch):
    CALLS.append("traced")
    return jnp.mean(batch["x"] @ params["w"] - batch["y"])


def linear(w, x):
    CALLS.append("traced")
    return jnp.mean(x @ w)


def dpsgd(**fields):
    return dpmp.DPSGD(**{**FIELDS, **fields})


def trainer(**fields):
    # With this key, the first batch has several examples.
    options = {"loss_fn": loss_fn, "optimizer": optax.sgd(0.1), "prng_key": KEY}
    options |= {"mechanism": dpsgd(), "policy": "float32"}
    return dpmp.DPTrainer(**options | fields)


def state():
    return trainer().init(PARAMS)


def done():
    """A state after as many steps as the run has."""
    return state()._replace(step=jnp.int32(2))


def fit(data=DATA, **options):
    return trainer().fit(state(), data, progress=False, **options)


def clip(*args, **options):
    fun = dpmp.clipped_grad(linear, **{"l2_clip_norm": 1.0, **options})
    return fun(*(args or (jnp.ones(3), BATCH)))


def clip_outputs(*args, **options):
    fun = dpmp.clipped_fun(lambda x: x, **{"l2_clip_norm": 1.0, **options})
    return fun(*(args or (BATCH,)))


def sampled(step=0, num_examples=8, key=7, **fields):
    fields = {"sampling_prob": 0.5, "iterations": 2, "truncated_batch_size": 8} | fields
    sampling = batch_selection.PoissonSampling(**fields)
    return sampling.indices(step, num_examples=num_examples, key=key)


def metrics(**fields):
    return dpmp.ReleasedMetrics(**fields)


def policy(**fields):
    dtypes = {"param_dtype": "float32", "compute_dtype": "bfloat16"}
    return dpmp.Policy(**{**dtypes, **fields})


def privatizer(**options):
    return noise_addition.gaussian_privatizer(**{"stddev": 1.0, **options})


def estimated(**options):
    options = {"policy": "float32", "optimizer": optax.sgd(0.1)} | options
    return estimate_memory(jnp.ones(3), BATCH, **options)


def compiled(**options):
    options = {"policy": "float32", "optimizer": optax.sgd(0.1)} | options
    return compiled_memory(linear, jnp.ones(3), BATCH, **options)


def plans(**options):
    options = {"num_examples": 5000, "num_processed": 20_000} | TARGET | options
    return planning.compare_batch_sizes(**options)


def adapters(targets="kernel", **options):
    params = {"kernel": jnp.full((3, 2), SECRET)}
    return lora.init(KEY, params, **{"rank": 2, "targets": targets, **options})


def trained():
    return jax.tree.map(lambda x: x + 1, adapters())


def adaptive(**fields):
    return dpmp.AdaptiveClipNorm(**{"initial": 1.0, **fields})


def sharding(*axes):
    types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=types)
    return jax.NamedSharding(mesh, jax.P(*axes))


class Broken:
    """A source that returns one row for any array of indices."""

    def __len__(self):
        return SIZE

    def __getitem__(self, indices):
        return {name: x[: len(indices) and 1] for name, x in DATA.items()}


class Singles:
    """A source of single examples, one of which is changed."""

    def __init__(self, change):
        self.change = change

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        example = {name: x[int(index)] for name, x in DATA.items()}
        return self.change(example) if index == 7 else example


# By a name, and by how the message begins.
CASES = {
    # DPTrainer and what it is given
    "trainer-mechanism: mechanism must be": lambda: trainer(mechanism=None),
    "trainer-optimizer-name: optimizer must be": lambda: trainer(optimizer="adam"),
    "trainer-optimizer-function: optimizer must be": lambda: trainer(
        optimizer=optax.adam
    ),
    "trainer-policy-name: policy must be": lambda: trainer(policy="bf16"),
    "trainer-policy-dtype: policy must be": lambda: trainer(policy=jnp.bfloat16),
    "trainer-loss-none: loss_fn must be": lambda: trainer(loss_fn=None),
    "trainer-loss-of-three: loss_fn must be": lambda: trainer(
        loss_fn=lambda w, batch, key: 0.0
    ),
    "trainer-loss-without-key: loss_fn must be": lambda: trainer(uses_prng_key=True),
    "trainer-loss-scale-3: loss_scale must be": lambda: trainer(loss_scale=3.0),
    "trainer-loss-scale-text: loss_scale must be": lambda: trainer(
        loss_scale="dynamic"
    ),
    "trainer-loss-scale-array: an array as loss_scale must": lambda: trainer(
        loss_scale=jnp.ones(2)
    ),
    "init-empty: params must be": lambda: trainer().init({}),
    "init-integers: every leaf of params must": lambda: trainer().init(
        {"w": jnp.zeros(3, int)}
    ),
    "init-function: every leaf of params must": lambda: trainer().init(
        {"w": jnp.ones(3), "f": jax.nn.relu}
    ),
    "init-text: every leaf of params must": lambda: trainer().init({"w": "weights"}),
    "init-complex: every leaf of params must": lambda: trainer().init(
        {"w": jnp.ones(3, complex)}
    ),
    "trainer-uses-key-text: uses_prng_key must be": lambda: trainer(uses_prng_key="no"),
    "trainer-uses-key-one: uses_prng_key must be": lambda: trainer(uses_prng_key=1),
    "trainer-key-integer: prng_key must be": lambda: trainer(prng_key=12345678),
    "trainer-key-old: prng_key must be": lambda: trainer(
        prng_key=jax.random.PRNGKey(1)
    ),
    "trainer-keys: prng_key must be": lambda: trainer(prng_key=jax.random.split(KEY)),
    "fit-uncalibrated: the mechanism must": lambda: trainer(
        mechanism=dpsgd(noise_multiplier=None)
    ).fit(state(), DATA),
    "guarantee-state: state must be": lambda: trainer().guarantee(PARAMS, delta=0.1),
    "guarantee-no-delta: epsilon must be": lambda: trainer().guarantee(state()),
    "guarantee-spent: state.spent must be": lambda: trainer().guarantee(
        state()._replace(spent=None), delta=0.1
    ),
    "fit-state: state must be": lambda: trainer().fit(PARAMS, DATA),
    "fit-spent: state.spent must be": lambda: trainer().fit(
        state()._replace(spent=np.zeros((1, 22), np.uint32)), DATA
    ),
    "fit-step-vector: state.step must": lambda: trainer().fit(
        state()._replace(step=jnp.zeros(2, int)), DATA
    ),
    "fit-step-negative: state.step must": lambda: trainer().fit(
        state()._replace(step=jnp.int32(-1)), DATA
    ),
    "fit-progress: progress must": lambda: trainer().fit(state(), DATA, progress="no"),
    "fit-directory-type: checkpoint_dir must be": lambda: fit(checkpoint_dir=3),
    "fit-directory-empty: checkpoint_dir must be": lambda: fit(checkpoint_dir=""),
    "fit-directory-url: checkpoint_dir must be": lambda: fit(
        checkpoint_dir="s3://runs/1"
    ),
    "fit-directory-nul: checkpoint_dir must be": lambda: fit(checkpoint_dir="a\0b"),
    "fit-directory-long: checkpoint_dir must be": lambda: fit(
        checkpoint_dir="/tmp/" + "long" * 1000
    ),
    "fit-stop-at-late: stop_at must be": lambda: fit(stop_at=3),
    "fit-stop-at-negative: stop_at must be": lambda: fit(stop_at=-1),
    "fit-stop-at-fraction: stop_at must be": lambda: fit(stop_at=1.5),
    "fit-callback: callback must be": lambda: fit(callback=3),
    "fit-sensitive-callback: sensitive_callback must be": lambda: fit(
        sensitive_callback="print"
    ),
    "fit-sharding: batch_sharding must be a": lambda: fit(batch_sharding=jax.P("data")),
    "fit-sharding-of-columns: batch_sharding must divide": lambda: fit(
        batch_sharding=sharding(None, "data")
    ),
    "fit-sharding-of-two-axes: batch_sharding must divide": lambda: fit(
        batch_sharding=sharding("data", "model")
    ),
    "data-none: the dataset must": lambda: fit(None),
    "data-text: the dataset must": lambda: fit(str(SECRET)),
    "data-records: the dataset must": lambda: fit([{"x": x} for x in DATA["x"]]),
    "data-rows: the dataset must": lambda: fit({"x": DATA["x"][:3], "y": DATA["y"]}),
    "data-short: the dataset must": lambda: fit(
        {name: x[:8] for name, x in DATA.items()}
    ),
    "data-scalar: the dataset must": lambda: fit(np.float32(SECRET)),
    "data-iterator: the dataset must": lambda: fit(iter(DATA["x"])),
    "data-strings: examples must be numbers": lambda: fit({"x": [str(SECRET)] * SIZE}),
    "data-ragged: examples must be numbers": lambda: fit(
        {"x": [[SECRET]] * 8 + [[SECRET, 1.0]] * 8}
    ),
    "data-broken-source: the source must": lambda: fit(Broken()),
    "check-source-none: the dataset must": lambda: dpmp.check_source(None),
    "check-source-broken: the source must": lambda: dpmp.check_source(Broken()),
    "check-source-one-differs: every record must have": lambda: dpmp.check_source(
        Singles(lambda x: {**x, "x": x["x"][:2]})
    ),
    "check-source-one-fails: every record must load": lambda: dpmp.check_source(
        Singles(lambda x: {**x, "x": str(SECRET)})
    ),
    "load-batch-state: state must be": lambda: trainer().load_batch(PARAMS, DATA),
    "load-batch-data: the dataset must": lambda: trainer().load_batch(state(), None),
    "train-step-state: state must be": lambda: trainer().train_step(
        PARAMS, DATA, np.zeros(4, bool)
    ),
    "train-step-size: every batch must": lambda: trainer().train_step(
        state(), DATA, np.zeros(3, bool)
    ),
    "train-step-mask: is_padding_example must be": lambda: trainer().train_step(
        state(), DATA, np.zeros(SIZE)
    ),
    "train-step-another: a batch must be drawn": lambda: trainer().train_step(
        state()._replace(step=jnp.int32(1)), trainer().load_batch(state(), DATA)
    ),
    "train-step-done: step must be below": lambda: trainer().train_step(
        done(), DATA, np.zeros(SIZE, bool)
    ),
    # DPSGD
    "dpsgd-num-examples-0: num_examples must be": lambda: dpsgd(num_examples=0),
    "dpsgd-num-examples-float: num_examples must be": lambda: dpsgd(num_examples=16.5),
    "dpsgd-batch-0: expected_batch_size must be": lambda: dpsgd(expected_batch_size=0),
    "dpsgd-batch-nan: expected_batch_size must be": lambda: dpsgd(
        expected_batch_size=np.nan
    ),
    "dpsgd-batch-too-large: expected_batch_size must be": lambda: dpsgd(
        expected_batch_size=17
    ),
    "dpsgd-iterations-0: iterations must be": lambda: dpsgd(iterations=0),
    "dpsgd-iterations-true: iterations must be": lambda: dpsgd(iterations=True),
    "dpsgd-clip-norm-negative: every l2_clip_norm must": lambda: dpsgd(
        l2_clip_norm=-1.0
    ),
    "dpsgd-clip-norm-zero: every l2_clip_norm must": lambda: dpsgd(l2_clip_norm=0),
    "dpsgd-clip-norm-nan: every l2_clip_norm must": lambda: dpsgd(l2_clip_norm=np.nan),
    "dpsgd-clip-norm-none: l2_clip_norm must": lambda: dpsgd(l2_clip_norm=None),
    "dpsgd-clip-norm-tiny: clip norms and normalize_by must": lambda: dpsgd(
        l2_clip_norm=1e-30
    ),
    "dpsgd-clip-norm-text: every l2_clip_norm must": lambda: dpsgd(l2_clip_norm="1"),
    "dpsgd-noise-negative: noise_multiplier must be": lambda: dpsgd(
        noise_multiplier=-1.0
    ),
    "dpsgd-noise-infinite: noise_multiplier must be": lambda: dpsgd(
        noise_multiplier=np.inf
    ),
    "dpsgd-rescale-text: rescale_to_unit_norm must be": lambda: dpsgd(
        rescale_to_unit_norm="yes"
    ),
    "dpsgd-rescale-number: rescale_to_unit_norm must be": lambda: dpsgd(
        rescale_to_unit_norm=0
    ),
    "dpsgd-metrics-dict: released_metrics must be": lambda: dpsgd(released_metrics={}),
    "dpsgd-metrics-class: released_metrics must be": lambda: dpsgd(
        released_metrics=dpmp.ReleasedMetrics
    ),
    "dpsgd-delta-0: delta must be": lambda: dpsgd(delta=0.0),
    "dpsgd-delta-1: delta must be": lambda: dpsgd(delta=1),
    "dpsgd-truncated-0: truncated_batch_size must be": lambda: dpsgd(
        truncated_batch_size=0
    ),
    "dpsgd-microbatch-0: microbatch_size must be": lambda: dpsgd(microbatch_size=0),
    "dpsgd-microbatch-float: microbatch_size must be": lambda: dpsgd(
        microbatch_size=2.5
    ),
    "dpsgd-arithmetic: arithmetic must be": lambda: dpsgd(arithmetic="float16"),
    'dpsgd-arithmetic-of-the-other: "bounded" sums must': lambda: dpsgd(
        arithmetic="bounded"
    ),
    "dpsgd-method: method must be": lambda: dpsgd(method="ghost"),
    'dpsgd-exact-book-keeping: "exact" sums must': lambda: dpsgd(
        method="book_keeping", arithmetic="exact"
    ),
    'dpsgd-bounded-add-remove: "bounded" sums must': lambda: dpsgd(
        method="book_keeping", neighboring_relation=ADD_OR_REMOVE
    ),
    "dpsgd-num-parameters: num_parameters must be": lambda: dpsgd(num_parameters=0),
    "dpsgd-sampling-prob: sampling_prob must be": lambda: dpsgd(sampling_prob=1.5),
    "dpsgd-relation: neighboring_relation must be": lambda: dpsgd(
        neighboring_relation="zero-out"
    ),
    "dpsgd-epochs: epochs must be": lambda: dpmp.DPSGD.from_epochs(
        epochs=0, num_examples=8, expected_batch_size=4, l2_clip_norm=1.0
    ),
    "dpsgd-nan-safe: a mechanism must": lambda: dpsgd().clipped_grad(
        linear, nan_safe=False
    ),
    "calibrate-epsilon-0: epsilon must be": lambda: dpsgd().calibrate(
        epsilon=0, delta=1e-5
    ),
    "calibrate-epsilon-infinite: epsilon must be": lambda: dpsgd().calibrate(
        epsilon=np.inf, delta=0.1
    ),
    "calibrate-delta-2: delta must be": lambda: dpsgd().calibrate(epsilon=1.0, delta=2),
    "guarantee-step-late: step must be": lambda: dpsgd(delta=1e-5).guarantee(3),
    "guarantee-step-negative: step must be": lambda: dpsgd(delta=1e-5).guarantee(-1),
    "guarantee-no-delta: epsilon must be computed": lambda: dpsgd().guarantee(),
    "guarantee-uncalibrated: the mechanism must": lambda: dpsgd(
        noise_multiplier=None
    ).guarantee(),
    "statement-uncalibrated: the mechanism must": lambda: dpsgd(
        noise_multiplier=None
    ).statement(),
    "privatizer-uncalibrated: the mechanism must": lambda: dpsgd(
        noise_multiplier=None
    ).privatizer(KEY),
    "privatizer-too-many-entries: the gradient must": lambda: (
        dpsgd(num_parameters=2).privatizer(KEY).update(jnp.ones(3), None)
    ),
    "metrics-none: at least one metric must": lambda: metrics(),
    "metrics-largest-loss: largest_loss must be": lambda: metrics(largest_loss=0.0),
    "metrics-norm-share: norm_share must be": lambda: metrics(
        fraction_clipped=True, norm_share=-1.0
    ),
    "automatic-stability: stability must be": lambda: dpmp.AutomaticClipping(
        stability=0.0
    ),
    "automatic-stability-text: stability must be": lambda: dpmp.AutomaticClipping(
        stability="0.1"
    ),
    "automatic-stability-tiny: stability must be": lambda: dpmp.AutomaticClipping(
        stability=1e-30
    ),
    "automatic-in-a-tree: every l2_clip_norm must": lambda: clip(
        l2_clip_norm=[dpmp.AutomaticClipping()]
    ),
    "automatic-clipped: fraction_clipped needs": lambda: dpsgd(
        l2_clip_norm=dpmp.AutomaticClipping(),
        released_metrics=metrics(fraction_clipped=True),
    ),
    "adaptive-initial: initial must be": lambda: adaptive(initial=0.0),
    "adaptive-initial-nan: initial must be": lambda: adaptive(initial=np.nan),
    "adaptive-initial-tree: initial must be": lambda: adaptive(initial={"w": 1.0}),
    "adaptive-quantile-0: quantile must be": lambda: adaptive(quantile=0),
    "adaptive-quantile-1: quantile must be": lambda: adaptive(quantile=1.0),
    "adaptive-learning-rate: learning_rate must be": lambda: adaptive(learning_rate=-1),
    "adaptive-norm-share: norm_share must be": lambda: adaptive(norm_share=np.inf),
    "adaptive-range: clip norms must satisfy": lambda: adaptive(highest=0.5),
    "adaptive-lowest: clip norms must satisfy": lambda: adaptive(lowest=1e-30),
    "adaptive-not-rescaled: an AdaptiveClipNorm needs": lambda: clip(
        l2_clip_norm=adaptive()
    ),
    "adaptive-unsafe: released_metrics and AdaptiveClipNorm must": lambda: clip(
        l2_clip_norm=adaptive(), rescale_to_unit_norm=True, nan_safe=False
    ),
    "adaptive-traced-vector: a traced l2_clip_norm must": lambda: jax.jit(
        lambda x: clip(l2_clip_norm=adaptive().at(x), rescale_to_unit_norm=True)
    )(jnp.ones(2)),
    "adaptive-outputs: every l2_clip_norm must": lambda: clip_outputs(
        l2_clip_norm=adaptive()
    ),
    "adaptive-no-norm-now: clip_norm must be given": lambda: dpsgd(
        l2_clip_norm=adaptive()
    ).clipped_grad(linear),
    "adaptive-no-norm-to-split: clip_norm must be given": lambda: dpsgd(
        l2_clip_norm=adaptive()
    ).split(jnp.ones(3)),
    "adaptive-not: clip_norm must be given": lambda: dpsgd().clipped_grad(
        linear, clip_norm=1.0
    ),
    # clipping
    "clip-norm-zero: every l2_clip_norm must": lambda: clip(l2_clip_norm=0.0),
    "clip-norm-zero-in-a-tree: every l2_clip_norm must": lambda: clip(
        l2_clip_norm={"a": 1.0, "b": 0.0}
    ),
    "clip-norm-infinite-rescaled: every l2_clip_norm must": lambda: clip(
        l2_clip_norm=np.inf, rescale_to_unit_norm=True
    ),
    "clip-norm-negative: every l2_clip_norm must": lambda: clip(l2_clip_norm=-1.0),
    "clip-norm-empty: l2_clip_norm must": lambda: clip(l2_clip_norm={}),
    "clip-norm-prefix: l2_clip_norm must be": lambda: clip(l2_clip_norm={"v": 1.0}),
    "clip-rescale-text: rescale_to_unit_norm must be": lambda: clip(
        rescale_to_unit_norm="yes"
    ),
    "clip-outputs-rescale-text: rescale_to_unit_norm must be": lambda: clip_outputs(
        rescale_to_unit_norm="yes"
    ),
    "clip-metrics-text: released_metrics must be": lambda: clip(
        released_metrics="loss"
    ),
    "clip-normalize-by-0: normalize_by must be": lambda: clip(normalize_by=0.0),
    "clip-argnums-negative: argnums must be": lambda: clip(argnums=-1),
    "clip-argnums-overlap: argnums, batch_argnums and prng_argnum must": lambda: clip(
        argnums=1
    ),
    "clip-too-few-arguments: there must be": lambda: clip(jnp.ones(3)),
    "clip-integers: every leaf of argument 0 must": lambda: clip(
        jnp.ones(3, int), BATCH
    ),
    "clip-no-array: argument 0 must": lambda: clip({}, BATCH),
    "clip-batch-scalar: all batched arguments must": lambda: clip(
        jnp.ones(3), jnp.float32(SECRET)
    ),
    "clip-batches-differ: all batched arguments must": lambda: clip(
        jnp.ones(3), (BATCH, BATCH[:2])
    ),
    "clip-microbatch: microbatch_size must divide the": lambda: clip(microbatch_size=3),
    "clip-method: method must be": lambda: clip(method="fast"),
    "clip-arithmetic: arithmetic must be": lambda: clip(arithmetic="double"),
    "clip-dtype: dtype must be float32": lambda: clip(dtype="bfloat16"),
    "clip-dtype-word: dtype must be float32 or float64": lambda: clip(dtype="exact"),
    "clip-dtype-dict: dtype must be float32 or float64": lambda: clip(
        dtype={"x": 1}, arithmetic="float32"
    ),
    "clip-resolution: resolution must be": lambda: clip(arithmetic=ExactSums(0)),
    'clip-exact-infinite: "exact" and "bounded" sums need': lambda: clip(
        l2_clip_norm=np.inf, arithmetic="exact"
    ),
    "clip-float64: float64 sums need": lambda: clip(arithmetic="float64"),
    "scaled-loss: loss_scale must be": lambda: ScaledLoss(linear, 3.0),
    "scaled-loss-dynamic: a dynamic loss_scale must": lambda: ScaledLoss(
        linear, loss_scaling.DynamicScale()
    ),
    "clip-scale-transform: pre_clipping_transform must be given": (
        lambda: dpmp.clipped_grad(
            ScaledLoss(linear, 2.0),
            l2_clip_norm=1.0,
            pre_clipping_transform=lambda x: x,
        )
    ),
    "clip-transform-book-keeping: pre_clipping_transform needs an engine": lambda: clip(
        method="book_keeping", pre_clipping_transform=lambda x: x
    ),
    "clip-unsafe-count: released_metrics and AdaptiveClipNorm must": lambda: clip(
        nan_safe=False, released_metrics=dpmp.ReleasedMetrics(fraction_overflowed=True)
    ),
    "clip-padding-dtype: is_padding_example must be": lambda: dpmp.clipped_grad(
        linear, l2_clip_norm=1.0
    )(jnp.ones(3), BATCH, is_padding_example=np.zeros(4, int)),
    "clip-padding-size: all batched arguments must": lambda: dpmp.clipped_grad(
        linear, l2_clip_norm=1.0
    )(jnp.ones(3), BATCH, is_padding_example=np.zeros(3, bool)),
    "clip-relation: neighboring_relation must be": lambda: dpmp.clipped_grad(
        linear, l2_clip_norm=1.0
    ).sensitivity("add"),
    "clip-outputs-norm: every l2_clip_norm must": lambda: clip_outputs(
        l2_clip_norm=-1.0
    ),
    "clip-outputs-norm-zero: every l2_clip_norm must": lambda: clip_outputs(
        l2_clip_norm=0.0
    ),
    "clip-outputs-microbatch: microbatch_size must divide the": lambda: clip_outputs(
        microbatch_size=3
    ),
    "clip-outputs-batch-argnums: batch_argnums must be": lambda: clip_outputs(
        batch_argnums="x"
    ),
    'clip-outputs-arithmetic: "bounded" sums must': lambda: clip_outputs(
        arithmetic="bounded"
    ),
    "clip-pytree-norm: every l2_clip_norm must": lambda: dpmp.clip_pytree(BATCH, -1.0),
    "clip-pytree-norm-zero: every l2_clip_norm must": lambda: dpmp.clip_pytree(
        BATCH, 0.0
    ),
    "clip-pytree-prefix: l2_clip_norm must be": lambda: dpmp.clip_pytree(
        {"a": BATCH}, {"b": 1.0}
    ),
    "clip-pytree-integers: every leaf of pytree must": lambda: dpmp.clip_pytree(
        jnp.ones(3, int), 1.0
    ),
    "clip-pytree-return-zero: return_zero must be": lambda: dpmp.clip_pytree(
        BATCH, 1.0, return_zero=2
    ),
    "clip-sum-as-update: a sum of clipped gradients must": lambda: optax.apply_updates(
        jnp.ones(3), TOTAL
    ),
    "clip-sum-divided: a sum of clipped gradients must": lambda: TOTAL / 4,
    # noise
    "noise-stddev-negative: stddev must be": lambda: privatizer(stddev=-1.0),
    "noise-stddev-nan: stddev must be": lambda: privatizer(stddev=np.nan),
    "noise-stddev-text: stddev must be": lambda: privatizer(stddev="1"),
    "noise-sensitivity: l2_sensitivity must be": lambda: privatizer(
        l2_sensitivity=-1.0
    ),
    "noise-key: prng_key must be": lambda: privatizer(prng_key=12345678),
    "noise-integers: every leaf of sum_of_clipped_grads must": lambda: privatizer(
        prng_key=KEY
    ).update(jnp.ones(3, int), privatizer(prng_key=KEY).init(None)),
    # sampling
    "sampling-prob-0: sampling_prob must be": lambda: sampled(sampling_prob=0.0),
    "sampling-prob-2: sampling_prob must be": lambda: sampled(sampling_prob=2.0),
    "sampling-iterations: iterations must be": lambda: sampled(iterations=0),
    "sampling-truncated: truncated_batch_size must be": lambda: sampled(
        truncated_batch_size=0
    ),
    "sampling-step-late: step must be": lambda: sampled(step=2),
    "sampling-step-negative: step must be": lambda: sampled(step=-1),
    "sampling-num-examples: num_examples must be": lambda: sampled(num_examples=0),
    "sampling-key-negative: key must be": lambda: sampled(key=-12345678),
    "sampling-key-jax: key must be": lambda: sampled(key=KEY),
    "pad-indices: batch_size must be": lambda: batch_selection.pad_indices(
        np.arange(12345, 12350), 3
    ),
    "pad-indices-floats: indices must be": lambda: batch_selection.pad_indices(
        np.array([12345.0, 12345.5]), 3
    ),
    "pad-indices-rows: indices must be": lambda: batch_selection.pad_indices(
        np.full((1, 2), 12345), 3
    ),
    "pad-indices-unsigned: indices must be": lambda: batch_selection.pad_indices(
        np.array([12345], np.uint64), 3
    ),
    # precision
    "policy-param-dtype: param_dtype must be float32": lambda: policy(
        param_dtype="float16"
    ),
    "policy-compute-dtype: compute_dtype must be": lambda: policy(compute_dtype="int8"),
    "policy-no-dtype: compute_dtype must be": lambda: policy(compute_dtype="bf16"),
    "policy-matmul-precision: matmul_precision must be": lambda: policy(
        matmul_precision="fast"
    ),
    "policy-paths-text: float32_paths must be": lambda: policy(float32_paths="norm"),
    "policy-paths-number: float32_paths must be": lambda: policy(float32_paths=3),
    "policy-paths-expression: every entry of float32_paths must": lambda: policy(
        float32_paths=("norm", "layers.(")
    ),
    "policy-paths-of-numbers: every entry of float32_paths must": lambda: policy(
        float32_paths=(3,)
    ),
    "policy-paths-unfound: every expression in float32_paths must": lambda: policy(
        float32_paths=("norm",)
    ).cast_to_compute(PARAMS),
    'policy-float8-scale: float8_scale must be "per_example"': lambda: policy(
        float8_scale=3.0
    ),
    "policy-name: policy must be": lambda: dpmp.Policy.from_name("fp16"),
    "autocast-policy: policy must be": lambda: dpmp.autocast(linear, policy="half"),
    "autocast-fun: fun must be": lambda: dpmp.autocast(None),
    "autocast-policy-type: policy must be": lambda: dpmp.autocast(
        linear, policy=jnp.bfloat16
    ),
    "report-fun: fun must be": lambda: dpmp.precision_report(None, jnp.ones(3)),
    "report-policy: policy must be": lambda: dpmp.precision_report(
        linear, BATCH, policy="half"
    ),
    "report-scale: loss_scale must be": lambda: dpmp.precision_report(
        linear, BATCH, loss_scale=3.0
    ),
    "report-no-arguments: there must be": lambda: dpmp.precision_report(linear),
    # loss scales
    "scale-target: target must be": lambda: loss_scaling.by_loss(0.0),
    "scale-largest: the largest scale must": lambda: loss_scaling.by_loss(
        largest=2.0**50
    ),
    "scale-interval: growth_interval must be": lambda: loss_scaling.DynamicScale(
        growth_interval=0
    ),
    "scale-tolerated: tolerated must be": lambda: loss_scaling.DynamicScale(
        tolerated=-1.0
    ),
    "scale-initial: loss_scale must be": lambda: loss_scaling.DynamicScale(initial=3.0),
    # accounting
    "event-noise: noise_multiplier must be": lambda: accounting.dpsgd_event(
        noise_multiplier=-1.0, iterations=2, sampling_prob=0.5
    ),
    "event-iterations: iterations must be": lambda: accounting.dpsgd_event(
        noise_multiplier=1.0, iterations=1.5, sampling_prob=0.5
    ),
    "event-prob: sampling_prob must be": lambda: accounting.dpsgd_event(
        noise_multiplier=1.0, iterations=2, sampling_prob=0.0
    ),
    "event-truncated: truncated_batch_size must be": lambda: (
        accounting.truncated_dpsgd_event(
            noise_multiplier=1.0,
            iterations=2,
            sampling_prob=0.5,
            num_examples=8,
            truncated_batch_size=0,
        )
    ),
    "epsilon-event: event must be": lambda: accounting.get_epsilon(None, delta=1e-5),
    "epsilon-delta: delta must be": lambda: accounting.get_epsilon(
        dpsgd().dp_event, delta=0.0
    ),
    "epsilon-relation: neighboring_relation must be": lambda: accounting.get_epsilon(
        dpsgd().dp_event, delta=1e-5, neighboring_relation="add"
    ),
    "calibrate-event: make_event must be": lambda: (
        accounting.calibrate_noise_multiplier(3, **TARGET)
    ),
    "truncation-prob: sampling_prob must be": lambda: accounting.truncation_probability(
        8, 2.0, 4
    ),
    "truncation-examples: num_examples must be": lambda: (
        accounting.choose_truncated_batch_size(0, 0.5)
    ),
    # LoRA
    "lora-unfound: at least one array must": lambda: adapters("kernal"),
    "lora-expression: a selection must be": lambda: adapters("("),
    "lora-rank: rank must be": lambda: adapters(rank=0),
    "lora-unused: the function must multiply with": lambda: adapters(
        fun=lambda params, x: jnp.sum(x), example_args=(BATCH,)
    ),
    "lora-convolution: every target of LoRA must": lambda: adapters(
        fun=lambda params, x: jnp.convolve(x[0], params["kernel"][0]).sum(),
        example_args=(BATCH,),
    ),
    "lora-params: adapters must come from": lambda: lora.apply(linear, PARAMS)(
        PARAMS, BATCH
    ),
    "lora-init-none: params must be": lambda: lora.init(KEY, None, 2, "kernel"),
    "lora-apply-none: params must be": lambda: lora.apply(linear, None),
    "lora-apply-no-adapters: adapters must come from": lambda: lora.apply(
        linear, PARAMS
    )(None, BATCH),
    "lora-merge-none: params must be": lambda: lora.merge(None, adapters()),
    "lora-merge-no-adapters: adapters must come from": lambda: lora.merge(PARAMS, None),
    "lora-save-none: params must be": lambda: lora.save(
        "unused", trained(), None, initial=None
    ),
    "lora-save-no-adapters: adapters must come from": lambda: lora.save(
        "unused", None, PARAMS, initial=None
    ),
    "lora-load-none: params must be": lambda: lora.load("unused", None),
    "lora-trained-none: params must be": lambda: lora.check_trained(
        trained(), initial=adapters(), params=None
    ),
    "lora-trained-no-adapters: adapters must come from": lambda: lora.check_trained(
        None, initial=adapters(), params=PARAMS
    ),
    "lora-trained-no-initial: adapters must come from": lambda: lora.check_trained(
        trained(), initial=None, params=PARAMS
    ),
    "lora-for-base-none: params must be": lambda: adapters().for_base(None),
    "lora-partition-none: params must be": lambda: lora.partition(None, "kernel"),
    "lora-combine-none: both parts of the parameters must": lambda: lora.combine(
        PARAMS, None
    ),
    "lora-combine-none-first: both parts of the parameters must": lambda: lora.combine(
        None, PARAMS
    ),
    # planning and tools
    "plan-epsilon: epsilon must be": lambda: plans(epsilon=0.0),
    "plan-delta: delta must be": lambda: plans(delta=1.0),
    "plan-processed: num_processed must be": lambda: plans(num_processed=0),
    "plan-few-examples: there must be 32": lambda: plans(num_examples=20),
    "memory-policy: policy must be": lambda: estimated(policy="half"),
    "memory-method: method must be": lambda: estimated(method="ghost"),
    "memory-arithmetic: arithmetic must be": lambda: estimated(arithmetic="half"),
    "memory-microbatch: microbatch_size must divide the": lambda: estimated(
        microbatch_size=3
    ),
    "memory-compiled-microbatch: microbatch_size must divide the": lambda: compiled(
        microbatch_size=3
    ),
    "memory-compiled-method: method must be": lambda: compiled(method="ghost"),
    "memory-overhead-batch: batch_size must be": lambda: accumulation_overhead(
        9, batch_size=0, num_positions=8
    ),
    "memory-overhead-measured: measured must be": lambda: accumulation_overhead(
        9, batch_size=8, num_positions=8, measured=-1.0
    ),
    "memory-share-rounds: rounds must be": lambda: measure_accumulation_share(
        linear, jnp.ones(3), BATCH, rounds=0
    ),
    "microbatches-none: there must be": lambda: measure_microbatch_sizes(
        None, BATCH, sizes=()
    ),
    "microbatches-0: size must be": lambda: measure_microbatch_sizes(
        None, BATCH, sizes=(0,)
    ),
    "microbatches-rounds: rounds must be": lambda: measure_microbatch_sizes(
        None, BATCH, rounds=0
    ),
    "devices-size: size must be": lambda: dpmp.devices.measure_dtypes(size=0),
    "extents-microbatch: microbatch_size must be": lambda: measure_extents(
        linear, jnp.ones(3), BATCH, microbatch_size=0
    ),
    "summarize-argnums: argnums, batch_argnums and prng_argnum must": lambda: summarize(
        linear, jnp.ones(3), BATCH, argnums=1
    ),
    'summarize-arithmetic: "exact" sums must': lambda: summarize(
        linear, jnp.ones(3), BATCH, arithmetic="exact"
    ),
}

# What is required; what was given; one or more sentences with the fix.
_THREE_PARTS = re.compile(
    r"^(?=.*\b(must|need|needs|may)\b).+; got .+[\w)'\"\]}>]\. [A-Z`].*\.\)?$",
    re.DOTALL,
)


@pytest.mark.parametrize("name", CASES)
def test_a_bad_input_is_told_what_is_required_what_was_given_and_what_to_do(name):
    CALLS.clear()
    required = re.escape(name.partition(": ")[2])
    with pytest.raises((ValueError, TypeError), match=required) as caught:
        CASES[name]()
    assert not CALLS
    message = str(caught.value)
    assert _THREE_PARTS.match(message), message
    told = "\n".join([message, *getattr(caught.value, "__notes__", ())])
    assert "12345" not in told


RUN = ["--num-examples", "5000", "--batch-size", "50", "--steps", "20"]
DELTA = ["--delta", "1e-5"]
COMMANDS = {
    "--noise-multiplier must": ["epsilon", *RUN, "--noise-multiplier", "-1", *DELTA],
    "delta must": ["epsilon", *RUN, "--noise-multiplier", "1", "--delta", "2"],
    "epsilon must": ["calibrate", *RUN, "--epsilon", "0", *DELTA],
    "--batch-size must": [
        *("calibrate", *RUN[:2], "--batch-size", "0", *RUN[4:], "--epsilon", "1"),
        *DELTA,
    ],
    "--batch-size must be at most --num-examples": [
        *("calibrate", *RUN[:2], "--batch-size", "9999", *RUN[4:], "--epsilon", "1"),
        *DELTA,
    ],
    "got --neighbors=add-or-remove-one. Use --neighbors zero-out": [
        *("statement", *RUN, "--epsilon", "1", *DELTA, "--method", "book_keeping"),
        *("--neighbors", "add-or-remove-one"),
    ],
    "--sampling-prob must": [
        *("epsilon", *RUN, "--noise-multiplier", "1", *DELTA, "--sampling-prob", "2")
    ],
    "--truncated-batch-size must": [
        *("epsilon", *RUN, "--noise-multiplier", "1", *DELTA),
        *("--truncated-batch-size", "0"),
    ],
    "--steps must": ["calibrate", *RUN[:-1], "0", "--epsilon", "1", *DELTA],
    "every --clip-norm must": [
        *("statement", *RUN, "--epsilon", "1", *DELTA, "--clip-norm", "-1")
    ],
    "there must be 32 examples": [
        *("plan", "--num-examples", "20", "--processed", "99", "--epsilon", "2", *DELTA)
    ],
    "--processed must": [
        *("plan", "--num-examples", "99", "--processed", "0", "--epsilon", "2", *DELTA)
    ],
    "size must": ["devices", "--size", "0"],
    "num_bytes must": ["memory", "--fit-in", "-1"],
    "heads must divide the width": ["memory", "--width", "30"],
    "microbatch_size must divide": ["memory", "--microbatch-size", "7"],
}


@pytest.mark.parametrize("required", COMMANDS)
def test_a_bad_number_on_the_command_line_is_told_the_same(required, capsys):
    with pytest.raises(SystemExit) as caught:
        main(COMMANDS[required])
    assert caught.value.code == 2
    usage, _, message = capsys.readouterr().err.partition("error: ")
    assert usage.startswith(f"usage: python -m dpmp {COMMANDS[required][0]} [-h]")
    assert required in message
    assert _THREE_PARTS.match(message.strip()), message
