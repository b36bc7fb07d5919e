"""Batches that are divided over devices: only sums are exchanged."""

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from reference import FLOAT_SUMS
from small_runs import KEY, new_trainer

from benchmarks.collectives import Collective, collectives
from dpmp import ReleasedMetrics, clipped_grad, loss_scaling
from dpmp.clipping import Shards
from dpmp.numerics import _float_sums
from dpmp.numerics._arithmetic import parse_arithmetic
from dpmp.programs import frozen

P = jax.P
SHAPES = {"w": (8, 16), "b": (16,), "scalar": ()}


def make_mesh(shape=(8,), names=("data",), axis_type=AxisType.Auto):
    devices = jax.devices()[: np.prod(shape)]
    types = (axis_type,) * len(shape)
    return jax.make_mesh(shape, names, axis_types=types, devices=devices)


def linear_loss(params, batch):
    """Its gradient is the example, whatever a compiler does."""
    products = jax.tree.map(lambda w, x: jnp.sum(w * x), params, batch)
    return sum(jax.tree.leaves(products))


def make_args(size=32):
    rng = np.random.default_rng(0)
    params = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    batch = {
        name: np.float32(rng.normal(0, 0.1, (size, *shape)))
        for name, shape in SHAPES.items()
    }
    return params, batch


def make_sum_fn(**options):
    options = {"l2_clip_norm": 0.5, "keep_batch_dim": False} | options
    return clipped_grad(linear_loss, **options)


def place(tree, mesh, spec):
    return jax.device_put(tree, NamedSharding(mesh, spec))


@functools.cache
def sum_on_one_device():
    return jax.jit(make_sum_fn(arithmetic="exact").__call__)(*make_args())


SPECS = {
    "whole": {"w": P(), "b": P(), "scalar": P()},
    "sharded": {"w": P(None, "data"), "b": P("data"), "scalar": P()},
}


def on_two_axes(spec):
    """A mesh with an axis of the model, and the way to divide one array."""
    return (2, 4), ("data", "model"), ("data",), SPECS["whole"] | {"w": spec}, None


# The shape and axes of a mesh, the axes that divide the batch (None leaves that to the
# compiler), the way to divide parameters, and the size of microbatches.
MESHES = {
    "two devices": ((2,), ("data",), ("data",), SPECS["sharded"], 16),
    "eight devices": ((8,), ("data",), ("data",), SPECS["whole"], 16),
    "at once": ((8,), ("data",), ("data",), SPECS["sharded"], None),
    "by the compiler": ((8,), ("data",), None, SPECS["whole"], None),
    "three axes": (
        (2, 2, 2),
        ("data", "fsdp", "model"),
        ("data", "fsdp"),
        {"w": P("model", "fsdp"), "b": P(("data", "fsdp")), "scalar": P()},
        None,
    ),
    "both axes": on_two_axes(P("data", "model")),
    "both axes, turned": on_two_axes(P("model", "data")),
    "the other axis": on_two_axes(P("model")),
}


@pytest.mark.bits
@pytest.mark.parametrize("name", MESHES)
def test_exact_sums_of_equal_gradients_are_the_same_on_any_mesh(name):
    shape, names, axes, specs, microbatch_size = MESHES[name]
    mesh = make_mesh(shape, names)
    params, batch = make_args()
    params = {name: place(x, mesh, specs[name]) for name, x in params.items()}
    fn = make_sum_fn(
        arithmetic="exact",
        microbatch_size=microbatch_size,
        spmd_axis_name=axes and Shards(axes, specs),
    )
    with jax.set_mesh(mesh):
        args = params, place(batch, mesh, P(axes or "data"))
        program = jax.jit(fn.__call__).lower(*args).compile()
    total = program(*args)
    jax.tree.map(np.testing.assert_array_equal, total, sum_on_one_device())
    for name, x in total.items():
        wanted = NamedSharding(mesh, specs[name])
        assert x.counts.sharding.is_equivalent_to(wanted, x.counts.ndim)
    if names == ("data", "model"):  # sums stay divided over the second axis
        found = [x for x in collectives(program.as_text()) if x.dtype == "s32"]
        assert max(x.num_entries for x in found) == params["w"].size // 4


def test_on_explicit_axes_a_batch_is_divided_as_it_is_sharded():
    mesh = make_mesh(axis_type=AxisType.Explicit)
    params, batch = make_args()
    args = place(params, mesh, P()), place(batch, mesh, P("data"))
    fn = jax.jit(make_sum_fn(arithmetic="exact", return_values=True).__call__)
    program = fn.lower(*args).compile().as_text()
    assert not any(carries_gradients(x, params) for x in collectives(program))
    total, sensitive = fn(*args)
    jax.tree.map(np.testing.assert_array_equal, total, sum_on_one_device())
    assert jax.typeof(sensitive.values).sharding.spec == P("data")


@pytest.mark.bits
@pytest.mark.parametrize(
    ("num_devices", "shards", "axis_type", "microbatch_size", "num_shards"),
    [
        (3, Shards(("data",), SPECS["whole"]), AxisType.Auto, 24, 3),
        (8, Shards(("data",), SPECS["sharded"]), AxisType.Auto, 24, 8),
        # The compiler divides the work, or each device adds up its own examples.
        pytest.param(8, None, AxisType.Auto, 8, 1, marks=pytest.mark.slow),
        pytest.param(8, None, AxisType.Explicit, 8, 8, marks=pytest.mark.slow),
    ],
)
def test_float_sums_over_devices_err_no_more_than_is_counted(
    num_devices, shards, axis_type, microbatch_size, num_shards
):
    mesh = make_mesh((num_devices,), axis_type=axis_type)
    params, batch = make_args(24)
    params, batch = place(params, mesh, P()), place(batch, mesh, P("data"))
    options = {"microbatch_size": microbatch_size, "spmd_axis_name": shards}
    fn = jax.jit(make_sum_fn(arithmetic="float32", **options).__call__)

    def total(is_empty):
        with jax.set_mesh(mesh):
            is_empty = place(is_empty, mesh, P("data"))
            sums = fn(params, batch, is_padding_example=is_empty)
        leaves = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(sums)]
        return np.concatenate(leaves)

    whole = total(np.zeros(24, bool))
    error = whole - sum(total(np.arange(24) != i) for i in range(24))
    sums = parse_arithmetic("float32")
    counted = _float_sums.reserve_needed(sums, 24, microbatch_size, num_shards) / 2
    # Contributions are at most the clip norm; float64 has roundings of its own.
    assert np.linalg.norm(error) <= 0.5 * counted + 1e-14
    assert np.linalg.norm(whole) > 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spmd_axis_name": "other"}, r"must name axes of the mesh.*\['data'\]"),
        ({"microbatch_size": 4}, "microbatch_size must be a multiple of the 8 devices"),
        ({"size": 12}, "batch size must be a multiple of the 8 devices"),
        (
            {"spmd_axis_name": Shards(("data",), P("data"))},
            "a partition spec for each of the 3 arrays",
        ),
    ],
)
def test_batches_that_cannot_be_divided_are_refused(options, message):
    options = dict(options)
    args = make_args(options.pop("size", 32))
    fn = make_sum_fn(**{"arithmetic": "exact", "spmd_axis_name": "data"} | options)
    with jax.set_mesh(make_mesh()), pytest.raises(ValueError, match=message):
        fn(*args)


@pytest.mark.parametrize(
    "options", [{"arithmetic": "exact"}, {"method": "book_keeping"}]
)
def test_gradients_that_jax_adds_over_devices_are_refused(options):
    fn = make_sum_fn(**options)
    params, batch = make_args()
    mapped = jax.shard_map(
        lambda batch: fn(params, batch),
        mesh=make_mesh(),
        in_specs=P("data"),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match=r"check_vma=False.*before they are clip"):
        mapped(batch)


def test_axes_that_the_caller_has_divided_are_refused():
    fn = make_sum_fn(arithmetic="exact", spmd_axis_name="data")
    params, batch = make_args()
    mapped = jax.shard_map(
        lambda batch: fn(params, batch),
        mesh=make_mesh(),
        in_specs=P("data"),
        out_specs=P(),
        check_vma=False,
    )
    with pytest.raises(ValueError, match="outside of shard_map"):
        mapped(batch)


# What the devices send each other in a step of training.


def carries_gradients(x: Collective, params):
    """Whether an array could hold the gradient of an example, or of several.

    It is larger than any parameter, or has float entries that are added up.
    """
    largest = max(np.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    is_sum = x.kind in ("all-reduce", "reduce-scatter") and x.dtype[0] in "bf"
    return x.num_entries > largest or (is_sum and x.num_entries > 1)


def make_trainer(loss_fn, **options):
    """A trainer on 64 records."""
    defaults = {"truncated_batch_size": 32, "iterations": 3, "l2_clip_norm": 0.5}
    return new_trainer(loss_fn=loss_fn, prng_key=KEY, **defaults | options)


def lowered_step(model, method, params, mesh):
    trainer = make_trainer(
        model.loss,
        expected_batch_size=20,
        microbatch_size=16,
        method=method,
        num_parameters=656,
    )
    state = trainer.init(params)
    batch = place(model.make_batch(0, 32), mesh, P("data"))
    return state, trainer.lower(state, batch)


def sharded(params, mesh):
    """Each array is divided along its first axis that the devices divide, if any."""

    def put(x):
        axes = (i for i, n in enumerate(x.shape) if n % mesh.size == 0)
        axis = next(axes, None)
        spec = P() if axis is None else P(*[None] * axis, "data")
        return place(x, mesh, spec)

    return jax.tree.map(put, params)


@pytest.mark.parametrize(
    ("model", "method", "is_sharded"),
    [
        (models.MLP, "per_example", False),
        (models.MLP, "book_keeping", True),
        pytest.param(models.TRANSFORMER, "book_keeping", True, marks=pytest.mark.slow),
    ],
)
def test_devices_exchange_sums_and_parameters_only(model, method, is_sharded):
    mesh = make_mesh()
    params = model.init(jnp.float32)
    params = sharded(params, mesh) if is_sharded else place(params, mesh, P())
    state, lowered = lowered_step(model, method, params, mesh)
    leaves, are_sharded = jax.tree.leaves(params), []
    for like, x in zip(jax.tree.leaves(state.opt_state), leaves, strict=True):
        assert like.sharding == x.sharding
        are_sharded.append(not x.sharding.is_fully_replicated)
    assert any(are_sharded) == is_sharded
    found = collectives(lowered.compile().as_text())
    sums = {
        Collective(
            "reduce-scatter" if divided else "all-reduce",
            "s32",
            x.addressable_shards[0].data.shape,
        )
        for x, divided in zip(leaves, are_sharded, strict=True)
    }
    count = {Collective("all-reduce", "s32", ())}  # of overflows
    gathered = {Collective("all-gather", "f32", x.shape) for x in leaves}
    assert sums <= set(found)
    assert set(found) <= sums | count | (gathered if is_sharded else set())
    assert not any(carries_gradients(x, params) for x in found)


def test_a_step_that_the_compiler_divides_is_found_to_send_gradients():
    mesh = make_mesh()
    params = place(models.MLP.init(jnp.float32), mesh, P())
    batch = place(models.MLP.make_batch(0, 32), mesh, P("data"))
    fn = clipped_grad(models.MLP.loss, l2_clip_norm=0.5, arithmetic="exact")
    program = jax.jit(fn.__call__).lower(params, batch).compile().as_text()
    assert any(carries_gradients(x, params) for x in collectives(program))


# Runs on several devices.


def quadratic_loss(params, batch):
    """Its gradient is `x + w / 2`, rounded once, whatever a compiler does."""
    squares = jax.tree.map(lambda w: jnp.sum(w * w) / 4, params)
    return linear_loss(params, batch) + sum(jax.tree.leaves(squares))


def trained(num_devices, *, is_sharded, axis_type=AxisType.Auto):
    """The parameters and the optimizer's state after three steps."""
    params, records = make_args(64)
    mesh = make_mesh((num_devices,), axis_type=axis_type)
    # Products with powers of two have no rounding that a compiler could leave out.
    trainer = make_trainer(
        quadratic_loss,
        expected_batch_size=16,
        microbatch_size=2 * num_devices,
        optimizer=optax.sgd(0.125, momentum=0.5),
    )
    params = sharded(params, mesh) if is_sharded else place(params, mesh, P())
    state = trainer.fit(
        trainer.init(params),
        records,
        batch_sharding=NamedSharding(mesh, P("data")),
        progress=False,
    )
    for x, like in zip(state.params.values(), params.values(), strict=True):
        assert x.sharding.is_equivalent_to(like.sharding, x.ndim)
    return jax.tree.map(np.asarray, (state.params, state.opt_state))


@functools.cache
def trained_on_one_device():
    return trained(1, is_sharded=False)


@pytest.mark.bits
@pytest.mark.parametrize(
    ("num_devices", "is_sharded", "axis_type"),
    [
        (8, True, AxisType.Auto),
        pytest.param(2, False, AxisType.Explicit, marks=pytest.mark.slow),
        pytest.param(8, True, AxisType.Explicit, marks=pytest.mark.slow),
    ],
)
def test_exact_runs_end_in_the_same_bits_on_any_number_of_devices(
    num_devices, is_sharded, axis_type
):
    found = trained(num_devices, is_sharded=is_sharded, axis_type=axis_type)
    jax.tree.map(np.testing.assert_array_equal, found, trained_on_one_device())


def test_scales_keys_metrics_and_frozen_arrays_reach_all_devices():
    mesh = make_mesh(axis_type=AxisType.Explicit)
    frozen = np.float32(np.random.default_rng(0).normal(size=(8, 8)))

    def loss(w, x, key):
        keep = jax.random.bernoulli(key, 0.5, (8,)).astype(x.dtype)
        return jnp.mean((x @ frozen.astype(x.dtype) * keep @ w) ** 2)

    trainer = make_trainer(
        loss,
        expected_batch_size=8,
        truncated_batch_size=16,
        microbatch_size=8,
        iterations=2,
        method="book_keeping",
        released_metrics=ReleasedMetrics(largest_loss=4.0, fraction_clipped=True),
        optimizer=optax.sgd(0.1),
        policy="mixed_float16",
        uses_prng_key=True,
        loss_scale=loss_scaling.DynamicScale(),
    )
    w = np.ones((8, 8), np.float32)
    placed = trainer.init(place(w, mesh, P("data")))
    data = np.random.default_rng(1).normal(size=(64, 8)).astype(np.float32)
    batch = trainer.load_batch(trainer.init(w), data)
    args = batch.examples, batch.is_padding_example
    expected = trainer.train_step(trainer.init(w), *args)
    batch, is_padding = place(args, mesh, P("data"))
    found = trainer.train_step(placed, batch, is_padding)
    # Products may be rounded in another way for another number of examples.
    np.testing.assert_allclose(found.params, expected.params, atol=1e-3)
    for name, x in expected.metrics.items():
        np.testing.assert_allclose(found.metrics[name], x, atol=1e-2)
    assert found.scale_state.scale == expected.scale_state.scale


def test_devices_skip_padding_together():
    """One alone would not take part in the collectives of the compiler's axis."""
    mesh = make_mesh((2, 2), ("data", "model"))
    num_examples = 4  # all on the first of the devices that divide the batch
    trainer = make_trainer(
        lambda w, x: jnp.mean((x @ w) ** 2),
        expected_batch_size=16,
        noise_multiplier=1e-3,
        microbatch_size=8,
        method="per_example",
        optimizer=optax.sgd(1.0),
    )
    w, x = np.ones((256, 128), np.float32), np.ones((32, 256), np.float32)
    state = trainer.train_step(
        trainer.init(place(w, mesh, P("model"))),
        *place((x, np.arange(32) >= num_examples), mesh, P("data")),
    )
    # All entries of a clipped gradient are 0.5 over the square root of their number.
    expected = 1 - 0.5 * num_examples / 16 / 256**0.5 / 128**0.5
    np.testing.assert_allclose(state.params, expected, atol=2e-3)


def gathered(trainer, state, x):
    """The shapes of all arrays that are gathered from the devices in a step."""
    found = collectives(trainer.lower(state, x).compile().as_text())
    return {c.shape for c in found if c.kind == "all-gather"}


@pytest.mark.parametrize(
    ("is_frozen", "method", "dtype", "axis"),
    [
        (True, "per_example", np.float32, 1),
        (False, "book_keeping", np.float32, 2),
        pytest.param(True, "book_keeping", np.int8, 2, marks=pytest.mark.slow),
    ],
)
def test_large_layers_are_gathered_one_at_a_time(
    monkeypatch, is_frozen, method, dtype, axis
):
    monkeypatch.setattr("dpmp.programs.frozen._SHARE_OF_STACKS", 0)
    mesh = make_mesh()
    stack = place(np.ones((3, 16, 16), dtype), mesh, P(*axis * [None], "data"))
    x = place(np.ones((32, 16), np.float32), mesh, P("data"))
    bias = place(np.zeros(16, np.float32), mesh, P())

    def loss(bias, stack, x):
        @jax.checkpoint
        def layer(h, matrix):
            return jnp.tanh(h @ matrix.astype(h.dtype).T + bias), None

        return jnp.mean(jax.lax.scan(layer, x, stack)[0] ** 2)

    trainer = make_trainer(
        (lambda params, x: loss(params[0], stack, x))
        if is_frozen
        else (lambda params, x: loss(*params, x)),
        expected_batch_size=20,
        microbatch_size=16,
        method=method,
    )
    state = trainer.init((bias,) if is_frozen else (bias, stack))
    assert gathered(trainer, state, x) == {(16, 16)}


@pytest.mark.parametrize("excess", [0, 1])
def test_small_stacks_and_arrays_that_others_read_are_gathered_at_once(
    monkeypatch, excess
):
    stack, spec = np.ones((3, 8, 8), np.float32), P(None, "data")
    # Trained stacks have sums of as many entries.
    num_bytes = 3 * stack.nbytes - excess
    monkeypatch.setattr("dpmp._meshes.memory_of_device", lambda: 4 * num_bytes)

    def apply(trained, whole, x):
        def layer(x, matrices):
            return functools.reduce(jnp.matmul, matrices, x), None

        return jax.lax.scan(layer, x @ whole[0], (stack, trained, whole))

    closed = jax.make_jaxpr(apply)(stack, stack + 1, np.ones((4, 8), np.float32))
    expected = [spec, spec, P()] if excess else [P()] * 3
    assert frozen.specs_of_parts(closed, [spec] * 3) == expected


# Ways to use an array.


def branch_in_a_loop(w, x, stack):
    def layer(h, inputs):
        matrix, i = inputs
        return jax.lax.cond(i % 2 == 0, lambda: h @ matrix @ w, lambda: h @ w), None

    layers = stack.reshape(4, 8, 8), jnp.arange(4)
    return jnp.mean(jax.lax.scan(layer, x, layers)[0] ** 2)


def loop_in_a_branch(w, x, stack):
    def layer(h, matrix):
        return h @ matrix @ w, None

    def through_layers():
        return jax.lax.scan(layer, x, stack.reshape(4, 8, 8))[0]

    return jnp.mean(jax.lax.cond(jnp.sum(w) > 0, through_layers, lambda: x) ** 2)


def loop(w, x, stack):
    @jax.checkpoint
    def layer(h, matrices):
        return h @ matrices[0].T @ jnp.tanh(matrices[1]) @ w, None

    return jnp.mean(jax.lax.scan(layer, x, stack)[0] ** 2)


def loop_in_a_loop(w, x, stack):
    def layer(h, matrix):
        return h @ matrix @ w, None

    def stage(h, layers):
        return jax.lax.scan(layer, h, layers)

    return jnp.mean(jax.lax.scan(stage, x, stack)[0] ** 2)


def entropy(w, x, stack):
    logits = jax.nn.relu(x @ stack[0, 0] @ w)  # has a rule, which sees `w`
    labels = jnp.zeros(len(x), jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def step_within(w, x, stack):
    def inner(w):
        return jnp.mean(jnp.where(x @ stack[0, 1] > 0, x @ w, 0.0) ** 2)

    return inner(w - 0.1 * jax.grad(inner)(w))


USES = (
    *(loop, loop_in_a_loop, loop_in_a_branch, branch_in_a_loop),
    *(entropy, step_within),
)


@pytest.mark.parametrize(
    ("method", "frozen_ones"),
    [
        (
            "book_keeping",
            {"loop_in_a_loop", "loop_in_a_branch", "entropy", "step_within"},
        ),
        ("per_example", {"loop", "step_within"}),
        pytest.param(
            "book_keeping",
            {"loop", "branch_in_a_loop", "step_within"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_arrays_on_a_mesh_may_be_read_anywhere(monkeypatch, method, frozen_ones):
    """Devices without examples take part in it, or the others would wait for them."""
    monkeypatch.setattr("dpmp.programs.frozen._SHARE_OF_STACKS", 0)
    rng, num_examples = np.random.default_rng(0), 9
    stacks = {
        use.__name__: np.float32(rng.normal(size=(2, 2, 8, 8)) / 4) for use in USES
    }
    if method == "per_example":
        del stacks["branch_in_a_loop"], stacks["loop_in_a_branch"]
    x = np.float32(rng.normal(size=(32, 8)))

    def loss(params, constants, x):
        stacks = {**params, **constants}
        w = params["w"]
        return sum(
            use(w, x, stacks[f]) for use in USES if (f := use.__name__) in stacks
        )

    mesh = make_mesh((2,))
    placed = {
        name: place(stack, mesh, P(None, "data")) for name, stack in stacks.items()
    }
    constants = {name: x for name, x in placed.items() if name in frozen_ones}
    params = {name: x for name, x in placed.items() if name not in frozen_ones}
    params["w"] = place(np.eye(8, dtype=np.float32), mesh, P())
    trainer = make_trainer(
        lambda params, x: loss(params, constants, x),
        expected_batch_size=16,
        microbatch_size=16,
        method=method,
        arithmetic=FLOAT_SUMS[method],
        l2_clip_norm=64.0,  # of no example
        noise_multiplier=0.0,
        optimizer=optax.sgd(1.0),
    )
    batch = place((x, np.arange(32) >= num_examples), mesh, P("data"))
    found = trainer.train_step(trainer.init(params), *batch).params

    def total(params, x):
        of_examples = jax.vmap(loss, in_axes=(None, None, 0))
        frozen_stacks = {name: stacks[name] for name in constants}
        return jnp.sum(of_examples(params, frozen_stacks, x[:, None]))

    params = jax.tree.map(np.asarray, params)
    grads = jax.jit(jax.grad(total))(params, x[:num_examples])
    for name, grad in grads.items():
        assert np.max(np.abs(grad)) > 0.01
        expected = params[name] - grad / 16
        np.testing.assert_allclose(found[name], expected, atol=1e-5)
