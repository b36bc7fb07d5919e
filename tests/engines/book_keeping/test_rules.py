"""Rules find the gradients that jax finds, for any shapes; and the cheap ones are used.

Data are small integers and losses multiply them, so that all gradients are integers
too: sums are compared without any tolerance.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
import reference
from programs import equations

from dpmp.clipping import clipped_grad
from dpmp.engines.book_keeping._engine import analyse
from dpmp.engines.book_keeping._linalg import num_roundings
from dpmp.engines.book_keeping._norms import by_product
from dpmp.programs.frozen import hoist_constants

_SIZE = 3
_IS_PADDING = np.array([False, True, False])

# A square root, and the roundings of squares that are too large for float32.
_NORM_ERROR = 8 * 2.0**-23


def _check(loss, params, batch, *constants):
    """Compares with the gradients of `loss`, a function of one example.

    The constants are traced. They are the last arguments of the loss.
    """

    @jax.jit
    def both(params, batch, constants):
        def fun(params, example):
            return loss(params, example, *constants)

        clipped_sum = clipped_grad(
            fun,
            l2_clip_norm=math.inf,
            keep_batch_dim=False,
            return_grad_norms=True,
            method="book_keeping",
            arithmetic="unproved_float32",
        )
        stack = jax.vmap(jax.grad(fun), in_axes=(None, 0))(params, batch)
        return clipped_sum(params, batch, is_padding_example=_IS_PADDING), stack

    (total, sensitive), stack = both(params, batch, constants)
    expected = reference.clipped_sum(stack, math.inf, keep=~_IS_PADDING)
    jax.tree.map(np.testing.assert_array_equal, total, expected)
    norms = np.where(_IS_PADDING, 0, reference.per_example_norms(stack))
    np.testing.assert_allclose(sensitive.grad_norms, norms, rtol=_NORM_ERROR)


class _Draw:
    """Small integers as floats."""

    def __init__(self):
        self._rng = np.random.default_rng(0)

    def values(self, shape, largest=2, dtype=jnp.float32):
        values = self._rng.integers(-largest, largest + 1, size=tuple(shape))
        return values.astype(dtype)

    def examples(self, shape, largest=2, dtype=jnp.float32):
        return self.values((_SIZE, *shape), largest, dtype)


def _weighted(draw, fun, params, batch):
    """A loss that has any integers as cotangents of what `fun` gives."""
    out = jax.eval_shape(fun, params, jax.tree.map(lambda x: x[0], batch))
    weights = draw.examples(out.shape)

    def loss(params, example):
        x, weights = example
        return jnp.sum(fun(params, x).astype(jnp.float32) * weights)

    return loss, params, (batch, weights)


# Products and rows of any shapes.


def _dot(contracting, batch=((), ()), *, is_turned=False):
    def fun(w, x):
        operands = (x, w) if is_turned else (w, x)
        return jax.lax.dot_general(*operands, (contracting, batch))

    return fun


def _convolution(layouts=("NCHW", "OIHW", "NCHW"), *, is_turned=False, **options):
    options = {"window_strides": (1, 1), "padding": "SAME"} | options

    def fun(w, x):
        operands = (w, x) if is_turned else (x, w)
        options["dimension_numbers"] = layouts
        return jax.lax.conv_general_dilated(*operands, **options)

    return fun


_IMAGE, _KERNEL = (2, 4, 5, 6), (3, 4, 3, 2)

# A function, and the shapes of its parameter and of one example.
_PRODUCTS = {
    # Batch, contracted and free axes, in any order, on either side.
    "dot": (_dot(((1,), (0,))), (3, 2), (2, 4)),
    "dot-of-many-axes": (
        _dot(((2, 0), (1, 3)), ((1,), (0,))),
        (3, 2, 4, 2),
        (2, 4, 3, 3),
    ),
    "dot-turned": (
        _dot(((1, 3), (2, 0)), ((0,), (1,)), is_turned=True),
        (3, 2, 4, 2),
        (2, 4, 3, 3),
    ),
    "dot-outer": (_dot(((), ())), (2,), (3,)),
    "dot-of-batches": (_dot(((), ()), ((1, 0), (0, 1))), (2, 3), (3, 2)),
    "dot-of-all": (_dot(((1, 0), (0, 1))), (2, 3), (3, 2)),
    "strides": (
        _convolution(window_strides=(2, 1), padding=((1, -1), (0, 2))),
        _KERNEL,
        _IMAGE,
    ),
    "dilated": (
        _convolution(rhs_dilation=(1, 2), padding=((1, 0), (2, 1))),
        _KERNEL,
        _IMAGE,
    ),
    "transposed": (
        _convolution(lhs_dilation=(2, 1), padding=((1, 0), (1, 1))),
        _KERNEL,
        _IMAGE,
    ),
    "groups": (_convolution(feature_group_count=2), (4, 2, 3, 2), _IMAGE),
    "depthwise": (_convolution(feature_group_count=4), (4, 1, 3, 2), _IMAGE),
    "batch-groups": (_convolution(batch_group_count=2), (4, 4, 3, 2), _IMAGE),
    "layouts": (_convolution(("HNWC", "WIHO", "CHNW")), (2, 4, 3, 3), (5, 2, 6, 4)),
    "one-axis": (
        _convolution(("NCW", "OIW", "NCW"), window_strides=(1,)),
        (3, 4, 3),
        (2, 4, 5),
    ),
    "data-as-kernel": (_convolution(is_turned=True), _IMAGE, _KERNEL),
}

# Rows along any axis; numbers out of range, and negative ones.
_GATHERS = {
    "take-clip": lambda w, ids: jnp.take(w, ids, axis=1, mode="clip"),
    "take-fill": lambda w, ids: jnp.take(w, ids, axis=0, mode="fill", fill_value=1),
    "take-wrap": lambda w, ids: jnp.take(w, ids, axis=2, mode="wrap"),
    "at-clip": lambda w, ids: w.at[:, ids].get(mode="clip"),
    "at-fill": lambda w, ids: w.at[:, :, ids].get(mode="fill", fill_value=1),
    "at-promised": lambda w, ids: w.at[ids % 3].get(mode="promise_in_bounds"),
}
_DTYPES = dict(zip(_PRODUCTS, itertools.cycle([jnp.float32, jnp.bfloat16])))
_FAST = {"dot-of-many-axes", "strides", "groups", "take-fill"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=[] if x in _FAST else pytest.mark.slow)
        for x in (*_PRODUCTS, *_GATHERS)
    ],
)
def test_sums_and_norms_are_those_of_the_gradients_that_jax_finds(name):
    draw = _Draw()
    if name in _GATHERS:
        ids = draw.examples((2, 2), 5, jnp.int32)
        _check(*_weighted(draw, _GATHERS[name], draw.values((3, 4, 3)), ids))
        return
    fun, *shapes = _PRODUCTS[name]
    dtype = _DTYPES[name]
    w = draw.values(shapes[0], dtype=dtype)
    x = draw.examples(shapes[1], dtype=dtype)
    _check(*_weighted(draw, fun, w, x))


# Equations without a rule of their own.

_OTHERS = {
    "dynamic_update_slice": lambda w, x, ids: jax.lax.dynamic_update_slice(
        x, w[:1], ids[:2]
    ),
    "scatter-into": lambda w, x, ids: w.at[ids].set(x, unique_indices=False),
    "pad": lambda w, x, ids: jax.lax.pad(w * x, w[0, 0], [(1, 0, 0), (0, 1, 1)]),
    "sort": lambda w, x, ids: jnp.sort(jnp.stack([x, w]), axis=0)[0],
    "select": lambda w, x, ids: jax.lax.select_n(x > 0, w, 2 * x),
    "gather-of-entries": lambda w, x, ids: w[ids, ids],
    "gather-of-slices": lambda w, x, ids: jax.vmap(
        lambda i: jax.lax.dynamic_slice_in_dim(w, i, 2)
    )(ids),
    "two-parameters": lambda w, x, ids: jax.lax.select_n(x > 0, w, w.T),
    "dot-of-two-views": lambda w, x, ids: jnp.einsum("ij,jk,kl->il", w, x, w),
    "cond": lambda w, x, ids: jax.lax.cond(x[0, 0] > 0, jnp.matmul, jnp.add, x, w),
    "while": lambda w, x, ids: jax.lax.fori_loop(0, 2, lambda i, c: c @ w, x),
    "associative_scan": lambda w, x, ids: jax.lax.associative_scan(jnp.add, w * x),
    "custom_jvp": lambda w, x, ids: _cubed(x, w),
    "custom_vjp": lambda w, x, ids: _doubled(x, w),
    "custom_vjp-named-as-a-primitive": lambda w, x, ids: dot_general(x, w),
    "custom_vjp-of-a-parameter": lambda w, x, ids: x @ _sign_of_gradient(w),
    "custom_vjp-in-jit": lambda w, x, ids: x @ jax.jit(_sign_of_gradient)(w.T),
    "custom_vjp-in-remat": lambda w, x, ids: x @ jax.checkpoint(_sign_of_gradient)(w),
    "custom_vjp-in-scan": lambda w, x, ids: (
        x @ jax.lax.scan(lambda c, row: (c, _sign_of_gradient(row)), 0.0, w)[1]
    ),
    "custom_vjp-in-cond": lambda w, x, ids: (
        x @ jax.lax.cond(w[0, 0] > 9, lambda w: w, _sign_of_gradient, w)
    ),
}


@jax.custom_jvp
def _cubed(x, w):
    return x * w


_cubed.defjvps(lambda dx, out, x, w: dx * w, lambda dw, out, x, w: 3 * x * dw)


@jax.custom_vjp
def _doubled(x, w):
    return x @ w


_DOUBLED = (
    lambda x, w: (x @ w, (x, w)),
    lambda saved, ct: (ct @ saved[1].T, 2 * (saved[0].T @ ct)),
)
_doubled.defvjp(*_DOUBLED)


@jax.custom_vjp
def dot_general(x, w):
    return x @ w


dot_general.defvjp(*_DOUBLED)


@jax.custom_vjp
def _sign_of_gradient(w):
    """Not linear: the gradient of a sum is another than the sum of gradients."""
    return 2 * w


_sign_of_gradient.defvjp(lambda w: (2 * w, None), lambda _, ct: (jnp.sign(ct),))


@pytest.mark.slow
@pytest.mark.parametrize("name", _OTHERS)
def test_other_equations_have_the_gradients_that_jax_finds(name):
    draw = _Draw()
    # Halves, so that there are no ties of data with parameters.
    example = (
        draw.examples((3, 3)) + np.float32(0.5),
        jnp.asarray([[0, 1, 2], [1, 2, 0], [2, 1, 0]]),
    )
    fun = _OTHERS[name]
    _check(*_weighted(draw, lambda w, x: fun(w, *x), draw.values((3, 3)), example))


# Shapes and dtypes that need some care.


# Without optimization, XLA itself takes other rows for indices of 8 bits.
@pytest.mark.parametrize(
    "dtype",
    [pytest.param(np.int8, marks=[pytest.mark.slow, pytest.mark.bits]), np.uint32],
)
def test_rows_may_be_more_than_their_numbers_can_name(dtype):
    def fun(w, ids):
        return jnp.take(w, ids, axis=0, mode="clip")

    # 300 rows, of which 8 bits name no more than 256.
    draw = _Draw()
    ids = (np.arange(100 * _SIZE).reshape(_SIZE, -1) % 100).astype(dtype)
    _check(*_weighted(draw, fun, draw.values((300, 2)), ids))


def test_rows_may_be_taken_at_the_numbers_of_a_constant_that_is_traced():
    numbers = [
        jnp.asarray([0, 1, 2]),
        np.asarray([4, 1, 1]),
        np.asarray([[0, 1, 2], [1, 2, 3]]),
    ]
    draw = _Draw()
    w = [draw.values((5, 2)) for _ in numbers]
    x = [draw.examples((*ids.shape, 2)) for ids in numbers]

    def loss(w, x, numbers):
        triples = zip(w, x, numbers, strict=True)
        return sum(jnp.sum(x * w[ids]) for w, x, ids in triples)

    _check(loss, w, x, numbers)
    # `DPTrainer` makes the constants of a loss arguments of its step.
    example = [rows[0] for rows in x]
    hoisted, constants, _ = hoist_constants(
        lambda w, x: loss(w, x, numbers), w, example
    )
    assert {np.size(constant) for constant in constants} >= {3, 6}
    _check(lambda w, x, constants: hoisted(constants, w, x), w, x, constants)


def test_a_fill_value_that_is_not_finite_stays_out_of_the_gradient():
    def loss(w, ids):
        return jnp.sum(w.at[ids].get(mode="fill", fill_value=math.nan))

    _check(loss, np.ones((4, 2), np.float32), np.int32([[0, 9], [1, 2], [7, 3]]))


def _loop_without_iterations(params, x):
    carry, _ = jax.lax.scan(lambda x, w: (x @ w, None), x, params["empty"])
    return carry @ params["w"]


_EMPTY = {
    "parameter": ((3, 0), lambda p, x: jnp.append(x @ p["w"], x @ p["empty"], axis=1)),
    "contraction": ((0, 2), lambda p, x: x @ p["w"] + x[:, :0] @ p["empty"]),
    "positions": ((3, 2), lambda p, x: jnp.sum(x[:0] @ p["empty"]) + x @ p["w"]),
    "bias": ((0,), lambda p, x: jnp.append((x @ p["w"]).ravel(), 2 * p["empty"])),
    "loop": ((0, 3, 3), _loop_without_iterations),
}


def test_arrays_may_be_empty():
    draw = _Draw()
    params = {
        name: {"w": draw.values((3, 2)), "empty": draw.values(shape)}
        for name, (shape, _) in _EMPTY.items()
    }

    def all_of_them(params, x):
        outputs = [fun(params[name], x).ravel() for name, (_, fun) in _EMPTY.items()]
        return jnp.concatenate(outputs)

    _check(*_weighted(draw, all_of_them, params, draw.examples((4, 3))))


@pytest.mark.parametrize(
    "loss",
    [lambda w, x: jnp.sum(x), lambda w, x: jnp.float32(1), lambda w, x: jnp.sum(w * w)],
    ids=["data-alone", "a-number", "parameters-alone"],
)
def test_losses_need_not_depend_on_all(loss):
    _check(loss, _Draw().values((3, 2)), _Draw().examples((3,)))


def test_tied_uses_of_different_dtypes_are_one_gradient():
    def fun(w, ids):
        x = w[ids]
        return jnp.einsum("td,vd->tv", x, w, preferred_element_type=jnp.float32)

    draw = _Draw()
    w = draw.values((5, 4), dtype=jnp.bfloat16)
    ids = np.abs(draw.examples((6,), 4, np.int32))
    _check(*_weighted(draw, fun, w, ids))


# Which rules and forms are chosen.


def _program(loss, params, example):
    shapes = jax.eval_shape(lambda *args: args, params, example)
    return analyse(lambda *args: (loss(*args), None), *shapes)


def _methods(loss, params, example):
    """For each parameter the forms of its norm methods, and the rules of their uses."""
    program = _program(loss, params, example)
    rules = [use.rule for use in program.plan.uses]
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): [
            (method.form, *(rules[i] for i in method.uses))
            for method in program.norm_methods
            if i in method.params
        ]
        for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(params))
    }


@functools.cache
def _methods_of_model(name):
    model = models.ZOO[name]
    example = jax.tree.map(lambda x: np.asarray(x)[0], model.make_batch(0, 1))

    def loss(params, example):
        return model.loss(params, jax.tree.map(lambda x: x[None], example))

    return _methods(loss, model.init(jnp.bfloat16), example)


_GRAM, _ENTRIES = ("gram", "dot"), ("entries", "add")
_IDENTITY = ("entries", "identity")
_CONVOLUTION = ("stored", "convolution")
_CHOSEN = {
    "mlp": {"hidden/w": [_GRAM], "hidden/b": [_ENTRIES], "out/b": [_ENTRIES]},
    "conv": {"kernel": [_CONVOLUTION], "bias": [_ENTRIES], "out": [_GRAM]},
    # Tied: one norm method, without a gradient in memory. Slices: one for each.
    "transformer": {
        "embedding": [("gram", "gather", "dot")],
        "position": [_ENTRIES],
        "scale": [("entries", "mul")] * 2,
        "qkv": [_GRAM],
    },
    "group_norm_cnn": {"stem": [("product", "convolution")]},
    # Loops: a stack of layers has one norm method; shared parameters have positions.
    "decoder-scan": {
        "layers/qkv": [_GRAM],
        "layers/scale": [("entries", "mul")] * 2,
        "layers/up_bias": [_ENTRIES],
        "shared": [("product", "dot")],
    },
    "decoder-scan-remat-tied": {
        "embedding": [("gram", "gather", "dot")],
        "shared": [("product", "dot")],
    },
    "lstm": {"cell/input": [_GRAM], "cell/bias": [_ENTRIES], "start": [_IDENTITY]},
    "vit": {"patch": [("gram", "convolution")], "cls": [("entries", "concatenate")]},
    # Computed from others: only their gradients tell.
    "weight_norm": {
        "direction": [("parameters", "dot")],
        "size": [("parameters", "dot")],
        "shift": [("entries", "mul")],
    },
    "lora": {"b": [_GRAM], "c": [("parameters", "dot")]},
    "shared": {"w": [("gram", "dot", "dot", "dot")], "halves": [_GRAM] * 2},
    "regularised": {"unused": [("parameters", *["dot"] * 6, "add")]},
    "control_flow": {
        "halves": [_IDENTITY],
        "w": [("parameters", "sub", "dot", "gather", "dynamic_slice")],
        "unused": [],
    },
}


@pytest.mark.parametrize("name", _CHOSEN)
def test_each_parameter_has_the_rules_and_forms_that_it_should(name):
    methods = _methods_of_model(name)
    assert {path: methods[path] for path in _CHOSEN[name]} == _CHOSEN[name]


@pytest.mark.parametrize("name", [name for name in models.ZOO if "scan" in name])
def test_a_loop_over_layers_sends_nothing_back_to_parameters(name):
    forms = {
        form for methods in _methods_of_model(name).values() for form, *_ in methods
    }
    assert forms == {"gram", "product", "entries"}


def _split(w, x):
    q, k, v = jnp.split(x @ w, 3, axis=1)
    return jnp.sum(q * k * v)


def _sliced(w, x):
    q, k, v = (x @ w[:, 3 * i : 3 * i + 3] for i in range(3))
    return jnp.sum(q * k * v)


def _overlapping(w, x):
    return jnp.sum(x @ w[:, :4]) + jnp.sum(x @ w[:, 3:]) + jnp.sum(x * w[:, 8])


def _interleaved(w, x):
    return jnp.sum(x @ w[:, ::2]) + jnp.sum(x @ jnp.flip(w[:, 1::2], 1).T.T)


def _plain(w, x):
    return jnp.sum(jnp.tanh(x @ w))


@jax.jit
def _rearranged(w, x):
    w = jnp.flip(w.T.astype(jnp.bfloat16)[1:], 0).reshape(4, 3, 2)
    x = x.astype(jnp.bfloat16)
    product = jax.checkpoint(lambda w, x: jnp.tensordot(x, w, 2))(w, x)
    return jnp.sum(product.astype(jnp.float32))


_OVERLAPPING = ("parameters", "dot", "dot", "mul")

# A loss, the shapes of its parameter and its data, and the norm methods.
_ONE_PARAMETER = {
    "split": (_split, (6, 9), (2, 6), [_GRAM]),
    "sliced": (_sliced, (6, 9), (2, 6), [_GRAM] * 3),
    "overlapping": (_overlapping, (6, 9), (2, 6), [_OVERLAPPING]),
    "interleaved": (_interleaved, (6, 9), (2, 6), [_GRAM] * 2),
    # The cheaper form is chosen.
    "4 positions": (_plain, (8, 8), (4, 8), [_GRAM]),
    "100 positions": (_plain, (8, 8), (100, 8), [("stored", "dot")]),
    "rearranged": (_rearranged, (6, 5), (2, 4, 3), [_GRAM]),
    "beside a constant": (
        lambda w, x: jnp.sum(x @ (w + np.ones((6, 5), np.float32))),
        (6, 5),
        (2, 6),
        [_GRAM],
    ),
    "stopped": (lambda w, x: jnp.sum(x @ jax.lax.stop_gradient(w)), (6, 5), (2, 6), []),
}
for _name in ("custom_vjp", "custom_vjp-of-a-parameter", "custom_jvp"):
    _loss = functools.partial(lambda fun, w, x: fun(w, x, None).sum(), _OTHERS[_name])
    _ONE_PARAMETER[_name] = _loss, (3, 3), (3, 3), [_IDENTITY]


@pytest.mark.parametrize("name", _ONE_PARAMETER)
def test_one_parameter_has_the_norm_methods_that_it_should(name):
    loss, param_shape, data_shape, expected = _ONE_PARAMETER[name]
    params, data = _Draw().values(param_shape), _Draw().examples(data_shape)
    assert _methods(loss, params, data[0]) == {"": expected}
    if loss is not _plain:  # whose gradients are no integers
        _check(loss, params, data)


def test_every_form_counts_the_roundings_of_its_norm():
    """As many as there are between a product and the sum of all squares."""
    for form, name in {
        "gram": "split",
        "product": "split",
        "parameters": "overlapping",
        "entries": "custom_vjp",
    }.items():
        loss, shape, data, _ = _ONE_PARAMETER[name]
        program, positions = _program(loss, np.zeros(shape), np.zeros(data)), data[0]
        (method,) = program.norm_methods
        if form == "product":  # no model as small as this has it
            method = by_product(0, program.plan.uses[0], 0)
        assert method.form == form
        roundings = method.roundings
        if form == "gram":
            # The products of two inner products, of six and of nine terms.
            assert roundings.inner >= num_roundings(positions**2) + sum(shape)
        else:
            assert roundings.total > num_roundings(math.prod(shape))
        if form in ("product", "parameters"):
            assert roundings.product > positions
        assert roundings.magnitude > num_roundings(positions)
        assert not method.cancels or roundings.positions >= positions


def test_what_aux_has_of_a_parameter_makes_no_use():
    def loss(w, x):
        return jnp.sum(x @ w), {"norm": jnp.sum(w * w), "w": w}

    shapes = jax.ShapeDtypeStruct((6, 5), jnp.float32), jax.ShapeDtypeStruct((6,), "f4")
    (use,) = analyse(loss, *shapes).plan.uses
    assert use.rule == "dot"


def test_the_program_of_a_convolution_does_not_grow_with_its_window():
    def num_products(width):
        def loss(kernel, x):
            return jnp.sum(jax.lax.conv(x, kernel, (1, 1), "SAME") ** 2)

        kernel, x = jnp.ones((2, 3, width, width)), jnp.ones((4, 3, 8, 8))
        grad_fn = clipped_grad(loss, l2_clip_norm=1.0, method="book_keeping")
        eqns = equations(jax.make_jaxpr(grad_fn)(kernel, x).jaxpr)
        return [eqn.primitive.name for eqn in eqns].count("dot_general")

    assert 0 < num_products(5) <= num_products(3)


@pytest.mark.parametrize(
    ("fun", "shape"),
    [
        (jnp.add, (4, 3)),
        (jnp.add, (1, 1)),
        (jnp.multiply, (1, 3)),
        (jnp.multiply, (4, 1)),
        (jnp.subtract, (1, 3)),
        (jnp.maximum, (4, 1)),
    ],
)
def test_an_elementwise_operation_may_repeat_a_parameter(fun, shape):
    draw = _Draw()
    params, batch = draw.values(shape), draw.examples((4, 3))
    _check(*_weighted(draw, lambda w, x: fun(x, w), params, batch))
