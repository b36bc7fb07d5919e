"""Which products are rounded to which format, and that examples stay apart in it."""

import functools
import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import qwix
import reference
from flax import linen
from models import ZOO
from small_runs import new_trainer

import dpmp
from dpmp import Policy, book_keeping
from dpmp.precision import _rules
from dpmp.programs.formats import FORMATS, round_to
from dpmp.programs.rounded_products import Choice, with_rounded_products

NAMES = "float8", "mxfp8", "nvfp4", "int8"


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _rounded(x, dtype, block=None, axis=-1, dithers=False):
    return round_to(x, dtype, block, axis, dithers=dithers)


# --------------------------------------------------------------------------- formats


@pytest.mark.parametrize(
    ("name", "error"), [("mxfp8", 2**-4), ("nvfp4", 1 / 4), ("int8", 1 / 2)]
)
def test_the_entries_of_a_block_share_a_scale_and_no_others_do(name, error):
    form = FORMATS[name]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 5 * form.block + 7)).astype(np.float32)
    rounded = _rounded(x, form.operands, form.block)
    changed = x.copy()
    changed[:, : form.block] *= 1e4
    again = _rounded(changed, form.operands, form.block)
    if name != "nvfp4":  # whose scales have one of their own
        np.testing.assert_array_equal(again[:, form.block :], rounded[:, form.block :])
    sizes = np.max(np.abs(x[:, : form.block]), axis=1, keepdims=True)
    # Half a step: relative to a number, or for integers to a 127th of the largest.
    unit = sizes / 127 if name == "int8" else np.abs(x[:, : form.block])
    smallest = 0 if name == "int8" else sizes / 6
    distance = np.abs(rounded - x)[:, : form.block]
    assert np.all(distance <= error * unit * 1.01 + smallest * (name == "nvfp4") / 4)
    assert np.any(distance > 0.5 * error * unit)


def test_numbers_of_nvfp4_are_those_of_the_format():
    x = np.float32([6, 5.1, 4.9, 2.4, 2.6, -1.3, 0.7, 0.2, 0, 0, 0, 0, 0, 0, 0, 0])
    found = _rounded(x * 2, jnp.float4_e2m1fn, 16)
    expected = np.float32(x.astype(ml_dtypes.float4_e2m1fn)) * 2
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_of_any_size_and_no_numbers_can_be_rounded(name):
    form = FORMATS[name]
    for x in (np.zeros((0, 5)), np.float32(2.5), np.zeros((2, 200))):
        found = _rounded(np.float32(x), form.operands, form.block)
        assert found.shape == np.shape(x)
    sizes = np.float32([1e-38, 3e-37, 1e-20, 1.0, 1e20, 3e38])[:, None]
    x = sizes * np.linspace(-1, 1, 128, dtype=np.float32)
    assert np.all(np.isfinite(_rounded(x, form.operands, form.block)))
    # A power of two in front changes nothing.
    x = np.concatenate([np.ones(128), 1e-7 * np.ones(128)]).astype(np.float32)
    for factor in (2.0**12, 2.0**24):
        rounded, again = (
            _rounded(y, form.operands, form.block) for y in (x, np.float32(factor) * x)
        )
        np.testing.assert_array_equal(again, np.float32(factor) * rounded)


@pytest.mark.parametrize("name", ["nvfp4", "int8"])
def test_dithered_cotangents_keep_their_mean(name):
    form = FORMATS[name]
    x = np.random.default_rng(1).uniform(0.05, 0.95, size=(4000, 16)).astype(np.float32)
    x[:, 0] = 1.0
    dithered, nearest = (
        _rounded(x, form.cotangents, form.block, -1, dithers)
        for dithers in (True, False)
    )
    bias = np.mean((dithered - x)[:, 1:])
    assert abs(bias) < 5 * np.std(dithered - x) / np.sqrt(x[:, 1:].size)
    assert not np.array_equal(dithered, nearest)
    np.testing.assert_array_equal(
        dithered, _rounded(x, form.cotangents, form.block, -1, True)
    )


# ----------------------------------------------------------------------------- rules


def _two_layers(params, x):
    hidden = jnp.tanh(x @ params["a"]["w"].T.reshape(6, 5))
    return jnp.sum(jnp.square(hidden @ params["b"]["w"]))


_rng = np.random.default_rng(2)
_PARAMS = {
    "a": {"w": _rng.normal(size=(5, 6)).astype(np.float32)},
    "b": {"w": _rng.normal(size=(5, 4)).astype(np.float32)},
}
_X = _rng.normal(size=(3, 6)).astype(np.float32)


def _under(products, loss=_two_layers, params=_PARAMS, x=_X, is_rounded=None):
    policy = Policy(jnp.float32, jnp.float32, "float32", products=products)
    fun = policy.in_product_precision(loss, is_rounded)
    return jax.jit(jax.value_and_grad(fun))(params, x)


def _by_hand(params, x):
    """The first product in integers, forward."""
    weights = params["a"]["w"].T.reshape(6, 5)
    x, weights = (
        z + jax.lax.stop_gradient(round_to(z, jnp.int8, 128, axis) - z)
        for z, axis in ((x, -1), (weights, 0))
    )
    return jnp.sum(jnp.square(jnp.tanh(x @ weights) @ params["b"]["w"]))


def test_the_first_expression_that_is_found_counts():
    expected = jax.jit(jax.value_and_grad(_by_hand))(_PARAMS, _X)
    for rules in (
        {"^a/": "int8_forward"},
        {"^b": "compute", "": "int8_forward"},
        [("a/w$", "int8_forward"), ("a", "nvfp4")],
    ):
        found = _under(rules)
        for ours, theirs in zip(
            jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert abs(_under({"": "int8_forward"})[0] - expected[0]) > 1e-4
    assert abs(_under(None)[0] - expected[0]) > 1e-4


def _stacked(params, x):
    def body(x, w):
        return jax.nn.relu(jax.checkpoint(lambda x, w: jnp.dot(x, w))(x, w)), None

    x, _ = jax.lax.scan(body, x, params["a"]["w"])
    return jnp.sum(x @ params["b"]["w"])


@pytest.mark.slow
def test_parameters_are_followed_into_loops_and_branches():
    rng = np.random.default_rng(3)
    params = {
        "a": {"w": 0.3 * rng.normal(size=(3, 6, 6)).astype(np.float32)},
        "b": {"w": rng.normal(size=(6, 4)).astype(np.float32)},
    }

    def branched(params, x):
        return jax.lax.cond(x[0, 0] > -1e9, lambda: _stacked(params, x), lambda: 0.0)

    def called(params, x):
        def body(x, w):
            return jax.jit(jnp.dot)(x, w), None

        x, _ = jax.lax.scan(body, x, params["a"]["w"])
        return jnp.sum(x @ params["b"]["w"])

    for loss in (_stacked, branched, called):
        plain, only_a, both, only_b = (
            _under(rules, loss, params)[0]
            for rules in (None, {"a": "nvfp4"}, "nvfp4", {"b": "nvfp4"})
        )
        assert len({float(x) for x in (plain, only_a, both, only_b)}) == 4
        # What is drawn gets into the bodies as well.
        for drawn, expected in (([1, 1, 1], both), ([0, 0, 0], plain)):
            found, _ = _under("nvfp4", loss, params, is_rounded=jnp.float32(drawn))
            np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:no product of the loss is rounded")
def test_parameters_are_followed_into_while_loops():
    def loss(params, x):
        def body(state):
            i, x = state
            return i + 1, jnp.tanh(x @ params["a"]["w"][:, :5].T)

        return jnp.sum(jax.lax.while_loop(lambda s: s[0] < 2, body, (0, x))[1])

    def value(rules, is_rounded=None):
        policy = Policy(jnp.float32, jnp.float32, products=rules)
        fun = policy.in_product_precision(loss, is_rounded)
        return float(jax.jit(fun)(_PARAMS, _X[:, :5]))

    assert value(None) == value({"b": "nvfp4"}) != value({"a": "nvfp4"})
    assert value("nvfp4", jnp.zeros(3)) == value(None)
    assert value("nvfp4", jnp.ones(3)) == value("nvfp4")


@pytest.mark.slow
def test_rules_that_round_no_product_are_warned_of():
    """As behind a layer in float32, whose result is not cast back."""
    policy = Policy(
        jnp.float32,
        jnp.bfloat16,
        float32_paths=("^a",),
        products={"^b": "int8", "^c": "nvfp4", "": "compute"},
    )
    params = {"a": jnp.ones((4, 4)), "b": jnp.ones((4, 4)), "c": jnp.ones((4, 4))}

    def loss(params, x):
        y = (x @ params["c"]).astype(jnp.float32) @ params["a"]
        return jnp.sum(y @ params["b"].astype(y.dtype))

    args = policy.cast_to_compute(params), policy.cast_inputs(jnp.ones((1, 4)))
    rounded = policy.in_product_precision(loss)
    with pytest.warns(UserWarning, match=r"no product.*products=\{'\^b': 'int8'\}"):
        jax.grad(rounded)(*args)


def test_expressions_that_are_not_found_are_refused():
    message = r"every expression in products.*\['c'\]. The first ones are a/w, b/w"
    with pytest.raises(ValueError, match=message):
        _under({"c": "int8"})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"weight_qtype": jnp.int8, "act_qtype": jnp.int8}, "int8_forward"),
        (dict.fromkeys(("weight_qtype", "act_qtype", "bwd_qtype"), "nvfp4"), "nvfp4"),
        (
            dict.fromkeys(
                ("weight_qtype", "act_qtype", "bwd_qtype"), jnp.float8_e4m3fn
            ),
            "float8",
        ),
        ({}, "compute"),
    ],
)
def test_rules_of_qwix_are_taken(given, expected):
    rule = qwix.QtRule(module_path="layers/.*/mlp", **given)
    rules = _rules.parse([rule])
    assert [form for _, form in rules] == [expected]
    rule = None if expected == "compute" else rules[0]
    assert _rules.rule_for(rules, "layers/3/mlp/kernel") == rule
    assert _rules.rule_for(rules, "layers/3/mlp2/kernel") is None
    assert _rules.rule_for(rules, "params/layers/3/mlp/kernel") == rule
    assert _rules.rule_for(rules, "encoder/layers/3/mlp/kernel") is None
    assert _rules.rule_for(rules, "layers/3/mlp/up/lora/kernel") is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"act_static_scale": True}, "remembers or shares other examples"),
        ({"tile_size": 32}, "must leave scales, blocks and operations"),
        ({"act_qtype": "unknown"}, "must have the format"),
        ({"act_qtype": None}, "must have one format"),
        ({"weight_qtype": "int4", "act_qtype": "int4"}, "must have the format"),
    ],
)
def test_rules_that_dpmp_cannot_follow_are_refused(given, message):
    rule = qwix.QtRule(**{"weight_qtype": jnp.int8, "act_qtype": jnp.int8} | given)
    with pytest.raises(ValueError, match=message):
        _rules.parse([rule])


# --------------------------------------------------------------------------- engines


def _summed(fun, method, **options):
    defaults = {"arithmetic": reference.FLOAT_SUMS[method], "l2_clip_norm": 0.1}
    summed = dpmp.clipped_grad(fun, method=method, **defaults | options)
    return jax.jit(summed.__call__)


def _with_products(fun, products, *, native=False):
    return with_rounded_products(fun, lambda _: Choice(products), native=native)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "products", "native"),
    [
        *((name, "float8", True) for name in ("mlp", "conv", "nested_loops", "lora")),
        ("decoder-scan", "float8", False),
        *itertools.product(["conv", "transformer"], NAMES[1:], [False]),
    ],
)
def test_both_engines_agree_and_have_the_same_rules(name, products, native):
    model = ZOO[name]
    params, batch = model.init(jnp.float32), model.make_batch(3, 6)
    fun = _with_products(model.loss, products, native=native)
    ours, theirs, wide = (
        _summed(f, method)(params, batch)
        for f, method in [
            (fun, "book_keeping"),
            (fun, "per_example"),
            (model.loss, "per_example"),
        ]
    )
    # A cotangent may be rounded to another neighbour if its last bits differ.
    allowed = 2e-2 if FORMATS[products].dithers else 1e-4
    assert reference.relative_distance(ours, theirs) <= allowed
    assert 1e-3 < reference.relative_distance(wide, theirs) < 0.5
    rules, expected = (
        [(row.path, row.rules) for row in book_keeping.summarize(f, params, batch).rows]
        for f in (fun, model.loss)
    )
    assert rules == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("products", "native"), [("float8", True), *((name, False) for name in NAMES)]
)
@pytest.mark.parametrize(
    ("method", "arithmetic"), [("per_example", "exact"), ("book_keeping", "bounded")]
)
def test_an_example_contributes_one_clip_norm_at_most_whatever_the_others_are(
    products, native, method, arithmetic
):
    model = ZOO["mlp"]
    params, batch = model.init(jnp.float32), model.make_batch(3, 6)

    def enlarge(x):
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.asarray(x).at[1:].multiply(2.0**20) if is_float else x

    fun = _with_products(model.loss, products, native=native)
    summed = _summed(fun, method, arithmetic=arithmetic)
    found = []
    for each in (batch, jax.tree.map(enlarge, batch)):
        whole, without = (
            summed(params, each, is_padding_example=np.arange(6) == empty)
            for empty in (6, 0)
        )
        change = reference.exact_squared_distance(whole, without)
        assert 0 < change <= Fraction(0.1) ** 2
        found.append(jax.tree.map(np.subtract, whole, without))
    if method == "per_example":
        jax.tree.map(np.testing.assert_array_equal, *found)


# -------------------------------------------------------------------------- rotation


def test_what_is_drawn_decides_what_is_rounded():
    @jax.jit
    def under(is_rounded):
        return _under("nvfp4", is_rounded=is_rounded)

    for drawn, rules in (
        ([1, 1, 1], "nvfp4"),
        ([0, 0, 0], None),
        ([1, 0, 0], {"^a": "nvfp4"}),
    ):
        found, expected = under(jnp.float32(drawn)), _under(rules)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_share_of_the_parameters_is_drawn_anew_for_each_step():
    policy = Policy(jnp.float32, jnp.bfloat16, products="int8", rounded_share=0.25)
    params = [jnp.zeros(2)] * 99
    drawn = [np.asarray(policy.draw_rounded(i, params)) for i in range(40)]
    assert {x.shape for x in drawn} == {(100,)}
    assert 0.21 < np.mean(drawn) < 0.29
    assert np.std(np.mean(drawn, axis=0)) > 0.03
    assert len({x.tobytes() for x in drawn}) == 40
    np.testing.assert_array_equal(drawn[3], policy.draw_rounded(3, params))
    with pytest.warns(UserWarning, match="has no effect without coins"):
        policy.in_product_precision(jnp.sum)
    with pytest.warns(UserWarning, match="Pass the step as an argument"):
        jax.jit(lambda: policy.draw_rounded(3, params))()
    fun = policy.in_product_precision(lambda w: jnp.sum(w[0]), jnp.ones(99))
    with pytest.raises(ValueError, match="a number for each parameter, and one for"):
        fun(params)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:products of few bits")
@pytest.mark.parametrize("method", ["per_example", "book_keeping"])
def test_a_rotating_policy_trains_with_one_program(method):
    policy = Policy(jnp.float32, jnp.float32, products="nvfp4", rounded_share=0.5)
    trainer = new_trainer(
        loss_fn=_two_layers,
        optimizer=optax.sgd(0.01),
        policy=policy,
        noise_multiplier=0.0,
        method=method,
        arithmetic=reference.FLOAT_SUMS[method],
    )
    state, data = trainer.init(_PARAMS), np.tile(_X, (22, 1))[:64]
    state = trainer.fit(state, data, progress=False)
    assert state.step == 7
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(state.params))
    assert len(trainer._programs._compiled) == 1


@pytest.mark.filterwarnings("ignore:'VariableState' was removed")  # in qwix
@pytest.mark.parametrize(
    ("method", "qtype"),
    [("book_keeping", jnp.int8), ("per_example", jnp.float8_e4m3fn)],
)
def test_examples_stay_apart_in_a_model_that_qwix_has_quantised(method, qtype):
    """Its scales are those of the example that the loss gets, in both engines."""
    formats = dict.fromkeys(("weight_qtype", "act_qtype", "bwd_qtype"), qtype)
    rules = [qwix.QtRule(module_path=".*", **formats)]
    model = qwix.quantize_model(linen.Dense(5), qwix.QtProvider(rules))
    x = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
    x[0] *= 1e4  # the others would be rounded to zero with its scale
    params = linen.Dense(5).init(jax.random.key(0), x)

    def of_module(module):
        summed = _summed(
            lambda params, x: jnp.mean(jnp.sin(module.apply(params, x))), method
        )
        return lambda x: jax.tree.leaves(summed(params, x))

    with jax.numpy_dtype_promotion("standard"):  # for qwix
        summed = of_module(model)
        together = summed(x)
        alone = [summed(x[i : i + 1]) for i in range(len(x))]
        plain = of_module(linen.Dense(5))(x)
    for total, *parts in zip(together, *alone, strict=True):
        np.testing.assert_allclose(total, np.sum(parts, axis=0), rtol=1e-4, atol=1e-6)
    assert reference.norm([a - b for a, b in zip(plain, together, strict=True)]) > 1e-3
