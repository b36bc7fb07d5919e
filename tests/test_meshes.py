"""Sums over the devices of a mesh, whatever the types of its axes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import AxisType, NamedSharding
from small_runs import new_trainer

from dpmp import AdaptiveClipNorm, GridArray, clipped_fun, clipped_grad, noise_addition
from dpmp.strategies import BandedToeplitz

P = jax.P

AXIS_TYPES = [AxisType.Auto, AxisType.Explicit]
each_axis_type = pytest.mark.parametrize("axis_type", AXIS_TYPES)
SLOW = pytest.mark.slow


def make_mesh(size, axis_type=AxisType.Auto):
    return jax.make_mesh(
        (size,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:size]
    )


def loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"])
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)


def normal(seed, **shapes):
    rng = np.random.default_rng(seed)
    return {name: np.float32(rng.normal(size=shape)) for name, shape in shapes.items()}


def make_params():
    return normal(0, w=(8, 16), out=(16, 1)) | {"b": np.zeros(16, np.float32)}


def make_batch():
    return normal(1, x=(16, 8), y=(16, 1))


def linear_loss(params, batch):
    """Its gradient is the example, whatever a compiler does."""
    products = jax.tree.map(lambda w, x: jnp.sum(w * x), params, batch)
    return sum(jax.tree.leaves(products))


def make_linear_batch():
    return normal(2, **{name: (16, *x.shape) for name, x in make_params().items()})


def place(tree, mesh, spec):
    return jax.device_put(tree, NamedSharding(mesh, spec))


def assert_same(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def make_sum_fn(method, arithmetic, **options):
    return clipped_grad(
        LOSSES[method],
        l2_clip_norm=0.5,
        method=method,
        arithmetic=arithmetic,
        keep_batch_dim=False,
        **options,
    ).__call__


LOSSES = {"per_example": linear_loss, "book_keeping": loss}
BATCHES = {"per_example": make_linear_batch(), "book_keeping": make_batch()}


@functools.cache
def sum_on_one_device(method, arithmetic, microbatch_size=None):
    fn = make_sum_fn(method, arithmetic, microbatch_size=microbatch_size)
    return jax.jit(fn)(make_params(), BATCHES[method])


FLOATS = [("per_example", "float32"), ("book_keeping", "unproved_float32")]


def sum_of_shards(mesh, method, arithmetic, **options):
    """What `psum` gives of the sums of all shards."""
    fn = make_sum_fn(method, arithmetic, **options)
    return jax.jit(
        jax.shard_map(
            lambda *args: jax.lax.psum(fn(*args), "data"),
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=P(),
            check_vma=False,
        )
    )


@pytest.mark.parametrize(
    ("method", "arithmetic", "axis_type"),
    [(*case, axis_type) for case, axis_type in zip(FLOATS, AXIS_TYPES, strict=True)],
)
def test_float_sums_of_shards_are_refused(method, arithmetic, axis_type):
    mesh = make_mesh(8, axis_type)
    args = place(make_params(), mesh, P()), place(BATCHES[method], mesh, P("data"))
    with pytest.raises(ValueError, match=r"mapped_axes={'data': 8}.*\"exact\" sums"):
        sum_of_shards(mesh, method, arithmetic)(*args)


def mapped_sum(x, **options):
    fn = clipped_fun(lambda x: x, **{"l2_clip_norm": 1.0, **options})
    return jax.pmap(lambda x: jax.lax.psum(fn(x), "i"), axis_name="i")(x)


def test_float_sums_of_mapped_devices_are_refused():
    with pytest.raises(ValueError, match="what other devices add"):
        mapped_sum(np.ones((8, 4)), arithmetic="float32")


@pytest.mark.parametrize("options", [{"l2_clip_norm": np.inf}, {"nan_safe": False}])
def test_float_sums_that_are_not_private_may_be_mapped(options):
    total = mapped_sum(np.ones((8, 1)), **options)
    np.testing.assert_allclose(total[0], 8, rtol=0.01)


@pytest.mark.parametrize(
    ("method", "arithmetic", "axis_type"),
    [
        ("per_example", "exact", AxisType.Auto),
        ("book_keeping", "bounded", AxisType.Explicit),
        pytest.param("per_example", "exact", AxisType.Explicit, marks=SLOW),
        pytest.param("book_keeping", "bounded", AxisType.Auto, marks=SLOW),
    ],
)
def test_integers_of_shards_add_up(method, arithmetic, axis_type):
    mesh = make_mesh(8, axis_type)
    args = place(make_params(), mesh, P()), place(BATCHES[method], mesh, P("data"))
    total = sum_of_shards(mesh, method, arithmetic)(*args)
    # Each device sums up a microbatch of two.
    assert_same(total, sum_on_one_device(method, arithmetic, 2))


@SLOW
@each_axis_type
@pytest.mark.parametrize(
    ("of_batch", "of_params", "size", "compiled"),
    [
        (P("data"), P(), 8, False),
        (P("data"), P("data"), 2, True),
        (P(), P("data"), 8, True),
    ],
)
def test_exact_sums_are_the_same_on_any_mesh(
    of_batch, of_params, size, compiled, axis_type
):
    mesh = make_mesh(size, axis_type)
    params, batch = make_params(), place(make_linear_batch(), mesh, of_batch)
    params = {
        **{name: place(x, mesh, P()) for name, x in params.items()},
        "w": place(params["w"], mesh, of_params),
    }
    fn = make_sum_fn("per_example", "exact", return_values=True)
    fn = jax.jit(fn) if compiled else fn
    total, sensitive = fn(params, batch)
    assert_same(total, sum_on_one_device("per_example", "exact"))
    if axis_type == AxisType.Explicit:
        assert jax.typeof(total["w"].counts) == jax.typeof(params["w"]).update(
            dtype=jnp.dtype("int32")
        )
        spec = jax.typeof(sensitive.values).sharding.spec
        assert spec[0] == (of_batch[0] if of_batch else None)


@pytest.mark.parametrize(
    "axis_type", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=SLOW)]
)
def test_one_example_changes_a_sharded_bounded_sum_by_at_most_the_clip_norm(axis_type):
    mesh = make_mesh(8, axis_type)
    params, batch = (
        place(make_params(), mesh, P()),
        place(make_batch(), mesh, P("data")),
    )
    fn = jax.jit(make_sum_fn("book_keeping", "bounded"))

    def total(*empty):
        is_empty = place(np.isin(np.arange(16), empty), mesh, P("data"))
        result = fn(params, batch, is_padding_example=is_empty)
        return jax.tree.map(lambda x: np.asarray(x, np.float64), result)

    whole = total()
    for i in range(0, 16, 5):
        change = jax.tree.map(np.subtract, whole, total(i))
        unit = whole["w"].unit
        assert 0.4 < reference.norm([x.counts for x in change.values()]) * unit <= 0.5


def test_random_keys_and_padding_may_be_explicit():
    def noisy_loss(w, x, key):
        return jnp.mean(x @ w * jax.random.normal(key, ()))

    mesh = make_mesh(4, AxisType.Explicit)
    fn = clipped_grad(
        noisy_loss, l2_clip_norm=1.0, arithmetic="exact", prng_argnum=2
    ).__call__
    args = np.ones(3, np.float32), np.ones((8, 3), np.float32), jax.random.key(0)
    padding = np.arange(8) > 5
    expected = jax.jit(fn)(*args, is_padding_example=padding)
    specs = P(), P("data"), P()
    args = [place(x, mesh, spec) for x, spec in zip(args, specs, strict=True)]
    padding = place(padding, mesh, P("data"))
    assert_same(jax.jit(fn)(*args, is_padding_example=padding), expected)


@pytest.mark.parametrize(
    "x",
    [GridArray(np.arange(32, dtype=np.int32), 2.0**-15), np.linspace(0, 1, 32)],
    ids=["grid", "float"],
)
def test_noise_is_added_to_explicit_sums(x):
    mesh = make_mesh(8, AxisType.Explicit)
    privatizer = noise_addition.gaussian_privatizer(
        stddev=0.5, prng_key=jax.random.key(0)
    )
    x = jax.tree.map(jnp.asarray, x)
    state, compiled = privatizer.init(x), jax.jit(privatizer.update)
    expected, _ = compiled({"w": x}, state)
    for update in (compiled, privatizer.update):
        noisy, _ = update({"w": place(x, mesh, P("data"))}, state)
        assert_same(noisy, expected)
        assert jax.typeof(noisy["w"]).sharding.spec == P("data")


def test_past_noise_stays_on_the_devices_of_its_sum():
    mesh = make_mesh(2, AxisType.Explicit)
    privatizer = noise_addition.correlated_gaussian_privatizer(
        stddev=0.5, strategy=BandedToeplitz((1.0, 0.5), 4), prng_key=jax.random.key(0)
    )
    shapes, specs = {"b": 3, "w": 8}, {"b": P(None), "w": P("data")}
    x = {k: GridArray(jnp.arange(n), 2.0**-15) for k, n in shapes.items()}
    update, state = jax.jit(privatizer.update), privatizer.init(x)
    expected, expected_state = update(x, state)
    x = {k: GridArray(place(v.counts, mesh, specs[k]), v.unit) for k, v in x.items()}
    _, past = state.past
    past = place(past, mesh, P(None, "data"))
    noisy, state = update(x, state._replace(past=(state.past[0], past)))
    assert_same((noisy, state.past), (expected, expected_state.past))
    assert {k: jax.typeof(v).sharding.spec for k, v in noisy.items()} == specs
    of_past = [jax.typeof(v).sharding.spec for v in state.past]
    assert of_past == [P(None, None), P(None, "data")]


def test_a_traced_clip_norm_may_live_on_an_explicit_mesh():
    mesh = make_mesh(2, AxisType.Explicit)
    adaptive = AdaptiveClipNorm(initial=1.0)

    def clip(l2_clip_norm, w, x):
        return clipped_grad(
            lambda w, x: jnp.sum(x * w),
            l2_clip_norm=adaptive.at(l2_clip_norm),
            rescale_to_unit_norm=True,
            arithmetic="float32",
        )(w, x)

    w, x, c = np.zeros(3, np.float32), np.ones((4, 3), np.float32), np.float32(0.7)
    expected = jax.jit(clip)(c, w, x)
    args = place(w, mesh, P()), place(x, mesh, P("data"))
    for clip_norm in (c, place(c, mesh, P())):
        assert_same(jax.jit(clip)(clip_norm, *args), expected)


@SLOW
@each_axis_type
def test_a_trainer_steps_on_any_mesh(axis_type):
    trainer = new_trainer(
        loss_fn=loss,
        expected_batch_size=8,
        iterations=3,
        l2_clip_norm=AdaptiveClipNorm(initial=0.5),
        truncated_batch_size=16,
        num_parameters=200,
        prng_key=jax.random.key(0),
    )
    is_padding = np.arange(16) > 9
    expected = trainer.init(make_params())
    for _ in range(3):
        expected = trainer.train_step(expected, make_batch(), is_padding)
    mesh = make_mesh(8, axis_type)
    params = place(make_params(), mesh, P())
    params["w"] = place(params["w"], mesh, P("data"))
    state = trainer.init(params)
    batch, is_padding = place((make_batch(), is_padding), mesh, P("data"))
    shardings = jax.tree.map(lambda x: x.sharding, state._replace(spent=None))
    for _ in range(3):
        state = trainer.train_step(state, batch, is_padding)
    # Products of a model are computed in another order on each mesh.
    for name, x in expected.params.items():
        np.testing.assert_allclose(state.params[name], x, rtol=1e-4, atol=1e-5)
    if axis_type == AxisType.Explicit:
        assert jax.typeof(state.params["w"]) == jax.typeof(params["w"])
        # Else the second step would be compiled anew.
        state = state._replace(spent=None)
        assert jax.tree.map(lambda x: x.sharding, state) == shardings
