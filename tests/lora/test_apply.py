"""That an adapted function is the function of the merged parameters."""

import re

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from lora.subjects import KEY, SUBJECTS, adapters_of, new_adapters, normal
from models import libraries as framework_models
from reference import FLOAT_SUMS, assert_trees_close
from refusals import refusals
from small_runs import fit, new_trainer

import dpmp
from dpmp import lora


def widened(x):
    return np.asarray(x, np.float64 if x.dtype == np.float32 else x.dtype)


@pytest.mark.parametrize("name", SUBJECTS)
def test_values_and_gradients_are_those_of_merged_parameters(name):
    subject = SUBJECTS[name]()

    @jax.jit
    def compared(params, batch, adapters):
        def merged(adapters):
            return subject.loss_fn(lora.merge(params, adapters), batch)

        adapted = lora.apply(subject.loss_fn, params)
        given = jax.value_and_grad(adapted)(adapters, batch)
        unchanged = subject.loss_fn(params, batch)
        return given, jax.value_and_grad(merged)(adapters), unchanged

    trees = subject.params, subject.batch, new_adapters(name), adapters_of(name)
    # In 32 bits the results depend on the order of sums, and so on the processor.
    with jax.enable_x64(True):
        params, batch, initial, adapters = jax.tree.map(widened, trees)
        given, expected, _ = compared(params, batch, adapters)
        new, merged, unchanged = compared(params, batch, initial)
        assert abs(given[0] - unchanged) > 1e-3 * abs(unchanged)
    assert_trees_close(given, expected, rtol=2e-5)
    # New adapters change nothing, and can learn.
    np.testing.assert_allclose([new[0], merged[0]], unchanged, rtol=1e-12)
    assert all(np.any(factors.b) for factors in new[1].factors.values())


# With products of all kinds, in loops and in branches.
@pytest.mark.parametrize("name", ["fused", "experts", "branches"])
def test_both_engines_clip_the_gradients_of_adapters(name):
    subject = SUBJECTS[name]()
    batch = np.stack([subject.batch, subject.batch[::-1]])

    @jax.jit
    def both(params, adapters):
        return [
            dpmp.clipped_grad(
                lora.apply(subject.loss_fn, params),
                l2_clip_norm=1e6,
                keep_batch_dim=False,
                method=method,
                arithmetic=arithmetic,
            )(adapters, batch)
            for method, arithmetic in FLOAT_SUMS.items()
        ]

    sums = both(subject.params, adapters_of(name))
    assert_trees_close(*sums, rtol=2e-5)


def test_a_rematerialised_function_may_return_a_target():
    """As `nnx.remat` does, which returns all parameters of its module."""
    params, x = {"w": normal(0, 12, 12)}, normal(1, 5, 12)

    def fun(params, x):
        layer = jax.checkpoint(lambda w, x: (w, jnp.tanh(x @ w)))
        w, _ = jax.lax.optimization_barrier((params["w"], jnp.arange(3)))
        w, x = layer(w, x)
        return jnp.sum(x @ w.T)

    initial = lora.init(KEY, params, 2, "w", fun=fun, example_args=(x,))
    adapters = jax.tree.map(lambda x: x + 0.1, initial)
    expected, slope = jax.value_and_grad(
        lambda adapters: fun(lora.merge(params, adapters), x)
    )(adapters)
    given = jax.value_and_grad(lora.apply(fun, params))(adapters, x)
    assert_trees_close(
        (given[0], given[1].factors), (expected, slope.factors), rtol=1e-5
    )


def test_no_gradient_is_as_large_as_the_target():
    subject, adapters = SUBJECTS["turned"](), adapters_of("turned")
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
    [("nnx_gemma", "kernel$", 5), ("haiku_transformer", "linear.*/w$", 2)],
)
@jax.numpy_dtype_promotion("standard")
def test_models_of_libraries(model, targets, least):
    task = framework_models.make(model)

    @jax.jit
    def all_three(params, key):
        args = (task.batch,)
        initial = lora.init(
            key, params, 2, targets, fun=task.loss_fn, example_args=args
        )
        assert len(initial.axes) >= least
        adapters = jax.tree.map(lambda x: x + 0.1, initial)
        merged = lora.merge(params, adapters)
        adapted = lora.apply(task.loss_fn, params)
        return adapted(adapters, *args), *(
            task.loss_fn(x, *args) for x in (merged, params)
        )

    given, expected, unchanged = all_three(task.params, KEY)
    np.testing.assert_allclose(given, expected, rtol=1e-5)
    assert abs(given - unchanged) > 1e-3


def dtypes_of(tree):
    return {x.dtype.name for x in jax.tree.leaves(tree)}


def test_a_run_trains_adapters_and_nothing_else_and_can_be_resumed(tmp_path):
    data = np.arange(192, dtype=np.int32).reshape(64, 3) % 11
    half = {"embed": normal(0, 11, 12), "layers": normal(1, 2, 12, 12)}
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), half)

    def loss_fn(params, tokens):
        x = params["embed"][tokens]
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
        return jnp.mean(x[..., 0])

    adapted = lora.apply(loss_fn, half)
    trainer = new_trainer(
        loss_fn=adapted,
        policy="mixed_bfloat16",
        prng_key=KEY,
        method="book_keeping",
    )
    initial = lora.init(KEY, half, 2, "layers", fun=loss_fn, example_args=(data[0],))
    frozen = jax.tree.map(np.array, half)
    trained = fit(trainer, state=trainer.init(initial), data=data).params
    jax.tree.map(np.testing.assert_array_equal, half, frozen)
    lora.check_trained(trained, initial=initial, params=half)
    assert dtypes_of(trained) == {"float32"}
    assert dtypes_of(lora.merge(half, trained)) == {"bfloat16"}
    loss, grads = jax.eval_shape(jax.value_and_grad(adapted), trained, data[0])
    assert (dtypes_of(loss), dtypes_of(grads)) == ({"bfloat16"}, {"float32"})

    fit(trainer, tmp_path, state=trainer.init(initial), data=data, stop_at=2)
    state = trainer.init_or_restore(initial, tmp_path)
    assert state.step == 2
    state = fit(trainer, tmp_path, state=state, data=data)
    jax.tree.map(np.testing.assert_array_equal, state.params, trained)
    assert jax.tree.structure(state.params) == jax.tree.structure(initial)

    # The frozen arrays are arguments of the step.
    shape = (trainer.mechanism.padded_batch_size, 3)
    batch = jax.ShapeDtypeStruct(shape, jnp.int32)
    program = trainer.lower(trainer.init(initial), batch).as_text()
    for array in jax.tree.leaves(half):
        dims = "x".join(map(str, array.shape))
        assert not re.search(rf"stablehlo\.constant.*tensor<{dims}xbf16>", program)
    assert "tensor<11x12xbf16>" in program  # the embedding


def convolved(params, x):
    return jnp.sum(
        jax.lax.conv_general_dilated(
            x[None], params["w"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
    )


def carried(params, x):
    return jnp.sum(jax.lax.fori_loop(0, 2, lambda _, w: w * 2.0, params["w"]) @ x.T)


def summed_in_part(params, x):
    w = params["w"].reshape(2, 6, 12)
    return jnp.sum(jnp.einsum("tk,hko->tho", x[:, :6], w))


USE = "every target of LoRA must be multiplied.*Leave this array out"
KERNEL = "'convolves with it'.*has no adapter: keep it frozen"
REFUSED = {
    "is looked up": (
        lambda p, x: jnp.sum(p["w"][np.array([0, 1])] @ x.T),
        "A table has no adapter",
    ),
    "is added": (lambda p, x: jnp.sum(x @ (p["w"] + 1.0)), USE),
    "is carried": (carried, USE),
    "is returned": (lambda p, x: (p["w"], jnp.sum(x)), USE),
    "is multiplied with itself": (lambda p, x: jnp.sum(p["w"] @ p["w"].T), USE),
    "is summed over in part": (summed_in_part, USE),
    "is a kernel": (convolved, KERNEL),
    "is rounded": (
        lambda p, x: jnp.sum(x @ p["w"].astype(jnp.int8).astype(jnp.float32)),
        "rounds it to integers",
    ),
    "is stopped": (
        lambda p, x: jnp.sum(x @ jax.lax.stop_gradient(p["w"])),
        "Or remove stop_gradient",
    ),
    "is divided by": (lambda p, x: jnp.sum(x @ (1.0 / p["w"])), USE),
}


@pytest.mark.parametrize(("fun", "message"), REFUSED.values(), ids=REFUSED)
def test_other_uses_of_a_target_are_refused(fun, message):
    shape = (3, 12, 4) if fun is convolved else (12, 12)
    params, x = {"w": normal(0, *shape)}, normal(1, 5, 12)
    with pytest.raises(ValueError, match=message):
        lora.apply(fun, params)(lora.init(KEY, params, 2, "w"), x)
    if fun is not summed_in_part:  # whose axes have roles
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


def test_adapters_that_do_not_fit_are_refused():
    params, x = {"w": normal(0, 12, 12), "v": normal(0, 12, 12)}, normal(1, 5, 12)
    adapters = lora.init(KEY, params, 2, ".")
    with pytest.raises(ValueError, match=r"never learns; got unused=\['v'\]"):
        lora.apply(lambda p, x: jnp.sum(x @ p["w"]), params)(adapters, x)
    with pytest.raises(TypeError, match=r"be dpmp\.lora\.apply\(loss_fn, params\)"):
        REFUSED["is added"][0](adapters, x)
    subject = SUBJECTS["decoder"]()
    adapters = lora.init(KEY, subject.params, 2, "query")  # (layers, width) stacked
    with pytest.raises(ValueError, match=r"target='layers/query'.*pass `fun`"):
        lora.apply(subject.loss_fn, subject.params)(adapters, subject.batch)


@refusals(
    ("targets", [["w", "v"]], r"unknown=\['v'\]"),
    ("targets", ["b"], "target='b', shape=.3,."),
    ("targets", ["ids"], "dtype='int32'"),
    ("alpha", [-1.0], "alpha must be"),
)
def test_wrong_targets_and_sizes_are_refused(wrong, message):
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(3), "ids": jnp.ones((2, 2), int)}
    with pytest.raises(ValueError, match=message):
        lora.init(KEY, params, **{"rank": 2, "targets": "w"} | wrong)


def test_the_scale_is_alpha_over_the_rank():
    params = {"w": np.ones((2, 3), np.float32)}
    adapters = lora.init(KEY, params, 4, "w", alpha=2.0)
    adapters = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), adapters)
    given = lora.merge(params, adapters)["w"]
    np.testing.assert_allclose(given, 1.0 + 0.5 * 4.0)


def test_a_kernel_is_trained_whole_beside_adapters():
    params = {"w": normal(0, 12, 3), "conv": normal(1, 3, 12, 12)}
    x = normal(2, 5, 12)

    def fun(params, x):
        return jnp.sum((x + convolved({"w": params["conv"]}, x)) @ params["w"])

    def loss_fn(trained, x):
        return lora.apply(fun, {**params, "conv": trained["kernel"]})(
            trained["adapters"], x
        )

    trained = {"adapters": lora.init(KEY, params, 2, "w"), "kernel": params["conv"]}
    grads = jax.jit(jax.grad(loss_fn))(trained, x)
    expected = jax.jit(jax.grad(fun))(params, x)["conv"]
    np.testing.assert_allclose(grads["kernel"], expected, rtol=1e-5, atol=1e-5)
