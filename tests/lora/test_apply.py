"""That an adapted function is the function of the merged parameters."""

import re

import framework_models
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from lora.subjects import KEY, SUBJECTS, adapters_of, new_adapters, normal, trained

import dpmp
from dpmp import lora


def assert_close(tree, expected, rtol=2e-5):
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        scale = float(jnp.max(jnp.abs(y)))
        assert scale > 0
        np.testing.assert_allclose(x, y, rtol=0, atol=rtol * scale)


@pytest.fixture(params=SUBJECTS.values(), ids=SUBJECTS)
def subject(request):
    return request.param()


def in_64_bits(tree):
    def widened(x):
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(jnp.float64) if is_float else x

    return jax.tree.map(widened, tree)


def test_values_and_gradients_are_those_of_merged_parameters(subject):
    adapters = adapters_of(subject)
    # In 32 bits the results depend on the order of sums, and so on the processor.
    with jax.enable_x64(True):
        params, batch = in_64_bits((subject.params, subject.batch))
        adapters = in_64_bits(adapters).for_base(params)
        subject = subject._replace(params=params, batch=batch)
        check_values_and_gradients(subject, adapters)


def check_values_and_gradients(subject, adapters):
    def merged_loss(adapters, batch):
        return subject.loss_fn(lora.merge(subject.params, adapters), batch)

    adapted = lora.apply(subject.loss_fn, subject.params)
    given = jax.jit(jax.value_and_grad(adapted))(adapters, subject.batch)
    expected = jax.jit(jax.value_and_grad(merged_loss))(adapters, subject.batch)
    assert_close(given, expected)
    unchanged = subject.loss_fn(subject.params, subject.batch)
    assert abs(float(given[0] - unchanged)) > 1e-3 * abs(float(unchanged))


def test_new_adapters_change_nothing(subject):
    adapters = new_adapters(subject)
    adapted = lora.apply(subject.loss_fn, subject.params)
    value, grads = jax.value_and_grad(adapted)(adapters, subject.batch)
    unchanged = subject.loss_fn(subject.params, subject.batch)
    np.testing.assert_allclose(value, unchanged, rtol=1e-6)
    assert all(np.any(factors.b) for factors in grads.factors.values())


def test_both_engines_clip_the_gradients_of_adapters(subject):
    adapters = adapters_of(subject)
    adapted = lora.apply(subject.loss_fn, subject.params)
    batch = jnp.stack([subject.batch, subject.batch[::-1]])
    results = [
        dpmp.clipped_grad(
            adapted,
            l2_clip_norm=1e6,
            keep_batch_dim=False,
            method=method,
            arithmetic=arithmetic,
        )(adapters, batch)
        for method, arithmetic in (
            ("per_example", "float32"),
            ("book_keeping", "unproved_float32"),
        )
    ]
    assert_close(*results)


def test_no_gradient_is_as_large_as_the_target():
    subject = SUBJECTS["turned"]()
    adapters = adapters_of(subject)
    adapted = lora.apply(subject.loss_fn, subject.params)
    program = jax.make_jaxpr(jax.grad(adapted))(adapters, subject.batch)
    shapes = {x.shape for x in subject.params.values()}
    shapes |= {shape[::-1] for shape in shapes}
    made = [
        (eqn.primitive.name, v.aval.shape)
        for eqn in program.eqns
        for v in eqn.outvars
        if v.aval.shape in shapes
    ]
    # The function itself turns W around and multiplies U by a number.
    assert sorted({name for name, _ in made}) in (
        ["mul", "transpose"],
        ["jit", "mul", "transpose"],
    )


@pytest.mark.parametrize(
    ("model", "targets", "least"),
    [
        (framework_models.linen_gpt2, "Dense_./kernel", 8),
        (framework_models.nnx_gemma, "kernel$", 10),
        (framework_models.haiku_transformer, "linear.*/w$", 4),
    ],
)
@jax.numpy_dtype_promotion("standard")
def test_models_of_libraries(model, targets, least):
    task = model()
    adapters = lora.init(
        KEY, task.params, 2, targets, fun=task.loss_fn, example_args=(task.batch,)
    )
    assert len(adapters.axes) >= least

    @jax.jit
    def both(adapters):
        merged = lora.merge(task.params, adapters)
        adapted = lora.apply(task.loss_fn, task.params)
        return adapted(adapters, task.batch), task.loss_fn(merged, task.batch)

    given, expected = both(trained(adapters))
    np.testing.assert_allclose(given, expected, rtol=1e-5)
    assert given != task.loss_fn(task.params, task.batch)


def test_a_frozen_base_stays_in_bfloat16():
    subject = SUBJECTS["decoder"]()
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), subject.params)
    adapters = adapters_of(subject._replace(params=half))
    assert {x.dtype for x in jax.tree.leaves(adapters)} == {jnp.dtype("float32")}
    adapted = lora.apply(subject.loss_fn, half)
    value, grads = jax.value_and_grad(adapted)(adapters, subject.batch)
    assert value.dtype == jnp.bfloat16
    assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    merged = lora.merge(half, adapters)
    assert {x.dtype for x in jax.tree.leaves(merged)} == {jnp.dtype("bfloat16")}
    expected = subject.loss_fn(merged, subject.batch)
    np.testing.assert_allclose(value.astype(float), expected.astype(float), rtol=0.05)


@pytest.fixture
def decoder_run():
    """A decoder in bfloat16, adapters of it, a trainer of adapters, and data."""
    subject = SUBJECTS["decoder"]()
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), subject.params)
    subject = subject._replace(params=half)
    mechanism = dpmp.DPSGD(
        num_examples=64,
        expected_batch_size=8,
        iterations=4,
        l2_clip_norm=1.0,
        method="book_keeping",
    ).calibrate(epsilon=8.0, delta=1e-4)
    trainer = dpmp.DPTrainer(
        mechanism=mechanism,
        loss_fn=lambda adapters, batch: lora.apply(subject.loss_fn, subject.params)(
            adapters, batch[0]
        ),
        optimizer=optax.sgd(0.1),
        policy="mixed_bfloat16",
        prng_key=jax.random.key(1),
    )
    data = np.random.default_rng(0).integers(11, size=(64, 5)).astype(np.int32)
    return subject, new_adapters(subject), trainer, data


def test_the_trainer_trains_adapters_and_nothing_else(decoder_run):
    subject, adapters, trainer, data = decoder_run
    frozen = jax.tree.map(jnp.copy, subject.params)
    state = trainer.init(adapters)
    state = trainer.fit(state, data, progress=False)
    lora.check_trained(state.params, initial=adapters, params=subject.params)
    jax.tree.map(np.testing.assert_array_equal, subject.params, frozen)


def test_the_frozen_arrays_are_an_argument_of_the_step(decoder_run):
    subject, adapters, trainer, _ = decoder_run
    state = trainer.init(adapters)
    shape = (trainer.mechanism.padded_batch_size, 5)
    lowered = trainer.lower(state, jax.ShapeDtypeStruct(shape, jnp.int32))
    for array in jax.tree.leaves(subject.params):
        dims = "x".join(map(str, array.shape))
        assert not re.search(
            rf"stablehlo\.constant.*tensor<{dims}xbf16>", lowered.as_text()
        )
    assert "tensor<11x12xbf16>" in lowered.as_text()  # the embedding, as an argument


def test_a_run_of_adapters_is_saved_and_resumed(decoder_run, tmp_path):
    _, adapters, trainer, data = decoder_run
    whole = trainer.init(adapters)
    whole = trainer.fit(whole, data, progress=False)
    state = trainer.init(adapters)
    options = {"progress": False, "checkpoint_dir": tmp_path, "every": 1}
    trainer.fit(state, data, stop_at=2, **options)
    state = trainer.init_or_restore(adapters, tmp_path)
    assert state.step == 2
    state = trainer.fit(state, data, **options)
    jax.tree.map(np.testing.assert_array_equal, state.params, whole.params)
    assert jax.tree.structure(state.params) == jax.tree.structure(adapters)


def test_the_scale_is_alpha_over_the_rank():
    params = {"w": jnp.ones((2, 3))}
    adapters = lora.init(KEY, params, 4, "w", alpha=2.0)
    adapters = jax.tree.map(jnp.ones_like, adapters)
    given = lora.apply(lambda p, x: x @ p["w"], params)(adapters, jnp.ones(2))
    np.testing.assert_allclose(given, 2.0 + 0.5 * 2.0 * 4.0)


def convolved(params, x):
    return jnp.sum(
        jax.lax.conv_general_dilated(
            x[None], params["w"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
    )


# With whether `apply` alone refuses it.
REFUSED = {
    "is looked up": (lambda p, x: jnp.sum(p["w"][jnp.array([0, 1])] @ x.T), False),
    "is added": (lambda p, x: jnp.sum(x @ (p["w"] + 1.0)), False),
    "is carried": (
        lambda p, x: jnp.sum(
            jax.lax.fori_loop(0, 2, lambda _, w: w * 2.0, p["w"]) @ x.T
        ),
        False,
    ),
    "is returned": (lambda p, x: (p["w"], jnp.sum(x)), False),
    "is multiplied with itself": (lambda p, x: jnp.sum(p["w"] @ p["w"].T), False),
    "is summed over in part": (
        lambda p, x: jnp.sum(
            jnp.einsum("tk,hko->tho", x[:, :6], p["w"].reshape(2, 6, 12))
        ),
        True,
    ),
}


@pytest.mark.parametrize(("fun", "by_apply_alone"), REFUSED.values(), ids=REFUSED)
def test_other_uses_of_a_target_are_refused(fun, by_apply_alone):
    params, x = {"w": normal(0, 12, 12)}, normal(1, 5, 12)
    message = "every target of LoRA must be multiplied.*Leave this array out"
    with pytest.raises(ValueError, match=message):
        lora.apply(fun, params)(lora.init(KEY, params, 2, "w"), x)
    if not by_apply_alone:
        with pytest.raises(ValueError, match=message) as caught:
            lora.init(KEY, params, 2, "w", fun=fun, example_args=(x,))
        # Advice to pass the function is not for those who did.
        assert "example_args" not in str(caught.value)


def test_a_refusal_names_the_line_of_the_model():
    params, x = {"w": normal(0, 12, 12)}, normal(1, 5, 12)
    refused, _ = REFUSED["is added"]
    line = refused.__code__.co_firstlineno
    for fun in (refused, jax.jit(refused), jax.checkpoint(refused)):
        with pytest.raises(ValueError, match=rf"line='{re.escape(__file__)}:{line}'"):
            lora.init(KEY, params, 2, "w", fun=fun, example_args=(x,))


def test_the_kernel_of_a_convolution_is_refused_with_advice_that_helps():
    params, x = {"w": normal(0, 3, 12, 4)}, normal(1, 5, 12)
    adapters = lora.init(KEY, params, 2, "w")
    for call in (
        lambda: lora.init(KEY, params, 2, "w", fun=convolved, example_args=(x,)),
        lambda: lora.apply(convolved, params)(adapters, x),
    ):
        message = "'convolves with it'.*has no adapter: keep it frozen"
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert "example_args" not in str(caught.value)


def test_an_unused_target_is_refused_by_apply():
    params, x = {"w": normal(0, 12, 12), "v": normal(0, 12, 12)}, normal(1, 5, 12)
    adapted = lora.apply(lambda p, x: jnp.sum(x @ p["w"]), params)
    with pytest.raises(ValueError, match=r"never learns; got unused=\['v'\]"):
        adapted(lora.init(KEY, params, 2, "."), x)


def test_axes_that_do_not_fit_the_program_are_refused():
    subject = SUBJECTS["decoder"]()
    adapters = lora.init(KEY, subject.params, 2, "query")  # (layers, width) stacked
    with pytest.raises(ValueError, match=r"target='layers/query'.*pass `fun`"):
        lora.apply(subject.loss_fn, subject.params)(adapters, subject.batch)


def test_an_axis_of_size_one_has_a_role_too():
    params, x = {"w": normal(0, 12, 1), "v": normal(1, 1, 12)}, normal(2, 5, 12)

    def fun(params, x):
        return jnp.sum(x @ params["w"]) + jnp.sum(x @ params["v"].T)

    adapters = lora.init(KEY, params, 2, ".", fun=fun, example_args=(x,))
    assert dict(adapters.axes) == {
        "w": lora.Axes((), (0,), (1,)),
        "v": lora.Axes((), (1,), (0,)),
    }
    adapters = trained(adapters)
    given = lora.apply(fun, params)(adapters, x)
    np.testing.assert_allclose(given, fun(lora.merge(params, adapters), x), rtol=1e-5)


@pytest.mark.parametrize(
    ("targets", "options", "message"),
    [
        ("qeury", {}, "at least one array must be selected; got targets='qeury'"),
        ("(", {}, "valid regular expression"),
        (["w", "v"], {}, r"unknown=\['v'\]"),
        ("b", {}, "target='b', shape=.3,."),
        ("ids", {}, "dtype='int32'"),
        ("w", {"rank": 0}, "rank must be"),
        ("w", {"alpha": -1.0}, "alpha must be"),
    ],
)
def test_wrong_targets_and_sizes_are_refused(targets, options, message):
    params = {
        "w": jnp.ones((2, 3)),
        "b": jnp.ones(3),
        "ids": jnp.ones((2, 2), jnp.int32),
    }
    with pytest.raises(ValueError, match=message):
        lora.init(KEY, params, targets=targets, **{"rank": 2, **options})


def test_a_kernel_is_trained_whole_beside_adapters():
    params = {"w": normal(0, 12, 3), "conv": normal(1, 3, 12, 12)}
    x = normal(2, 5, 12)

    def fun(params, x):
        return jnp.sum((x + convolved({"w": params["conv"]}, x)) @ params["w"])

    def loss_fn(trained, x):
        return lora.apply(fun, {**params, "conv": trained["kernel"]})(
            trained["adapters"], x
        )

    trained = {
        "adapters": lora.init(KEY, params, 2, "w"),
        "kernel": params["conv"],
    }
    grads = jax.grad(loss_fn)(trained, x)
    expected = jax.grad(fun)(params, x)["conv"]
    np.testing.assert_allclose(grads["kernel"], expected, rtol=1e-5, atol=1e-5)
