"""What every gradient engine owes to clipping, asked through the interface alone."""

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
import reference
from models import Model

from dpmp.engines._methods import METHODS, make_engine
from dpmp.engines._signature import Signature
from dpmp.numerics import UNIT_ROUNDOFF
from dpmp.numerics._arithmetic import parse_arithmetic

_SIZE = 6

# Float32 roundings of norms and sums, of six examples and fewer than 64 positions, and
# of the model's own sums, which each engine has in an order of its own.
_FLOAT32_ERROR = 16 * 2.0**-23

# A half-precision gradient has the error of its activations, which all engines have in
# common. The rest is independent, and so may be larger by chance.
_BY_CHANCE = 1.5

# The norms of six examples are few: the ratio of two independent errors of six numbers,
# a root of F(6, 6), is above 2.9 with a probability of 1 %.
_NORMS_BY_CHANCE = 3

# Book-keeping rounds a bfloat16 factor once more, when it is weighted.
_WEIGHTING_ERROR = {"float32": 0.0, "float16": 0.0, "bfloat16": 2.0**-8}

# Two programs round a loss of the model's own arithmetic differently.
_LOSS_ERROR = {"float32": 16 * 2.0**-23, "float16": 4 * 2.0**-11, "bfloat16": 2.0**-6}


class Variant(NamedTuple):
    """An engine, and how it is made."""

    method: str
    is_bounded: bool = False
    loss_scale: float | None = None

    def make(self, loss: Callable[..., Any], **roles: Any) -> Callable[..., Any]:
        signature = Signature.parse(**{"argnums": 0, "batch_argnums": 1, **roles})
        engine, _ = make_engine(
            loss,
            signature,
            method=self.method,
            is_bounded=self.is_bounded,
            loss_scale=self.loss_scale,
        )
        return engine

    def arithmetic(self, width: str = "float32") -> Any:
        if width == "float64":  # no user has it for book-keeping
            return parse_arithmetic("float64")
        return parse_arithmetic(reference.FLOAT_SUMS[self.method], method=self.method)


_VARIANTS = {
    **{method: Variant(method) for method in METHODS},
    **{f"{method}-scaled": Variant(method, loss_scale=2.0**9) for method in METHODS},
    "book_keeping-bounded": Variant("book_keeping", is_bounded=True),
}
_BOTH = pytest.mark.parametrize("variant", list(map(Variant, METHODS)), ids=METHODS)


def _weighted_loss(model: Model) -> Callable[..., Any]:
    """With a float in every batch, whatever the model takes, and auxiliary outputs."""

    def loss(params: Any, batch: Any) -> Any:
        value = batch["weight"][0] * model.loss(params, batch["inputs"])
        return value, {"weight": batch["weight"], "square": value * value}

    return loss


def _make_batch(model: Model, seed: int) -> Any:
    weight = np.random.default_rng(seed).uniform(0.5, 2.0, _SIZE)
    inputs = model.make_batch(seed, _SIZE)
    return {"inputs": inputs, "weight": np.float32(weight)}


@functools.cache
def _gradients(model: Model, dtype: str) -> tuple[Any, Any, Any]:
    """Losses and gradients by `jax.vmap`, and gradients of the model in float32."""
    loss = _weighted_loss(model)
    model = model._replace(loss=lambda params, batch: loss(params, batch)[0])
    params, batch = model.init(jnp.dtype(dtype)), _make_batch(model, 3)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float32), params)
    losses, stack = models.per_example_losses_and_grads(model, params, batch)
    return losses, stack, models.per_example_losses_and_grads(model, wide, batch)[1]


class Case(NamedTuple):
    """An engine and a model in some precision; `run` is that of `_make_case`."""

    model: Model
    dtype: str
    batch: Any
    losses: Any  # (B,)
    stack: Any  # per-example gradients, as jax computes them
    wide: Any  # those of the model in float32, for the same parameters
    run: Callable[..., Any]


class Output(NamedTuple):
    """Whatever the interface gives for a batch; groups are the parts of a model."""

    values: Any
    aux: Any
    norms: Any
    norms_of_groups: Any
    bound: Any
    total: Any


def _make_case(variant: Variant, model: Model, dtype: str) -> Case:
    engine = variant.make(_weighted_loss(model), has_aux=True)
    params = model.init(jnp.dtype(dtype))
    whole, parts = jax.tree.structure(0), jax.tree.structure(dict.fromkeys(params, 0))

    @jax.jit
    def compute(batch: Any, coefs: Any, keep: Any) -> Output:
        grads = engine(params, batch)
        (norm,) = grads.squared_norms(whole)
        bound = norm.bound
        if bound is None:
            slack = (1 + UNIT_ROUNDOFF) ** norm.roundings
            bound = slack * norm.value + norm.underflow
        arithmetic = variant.arithmetic()
        return Output(
            grads.values,
            grads.aux,
            norm.value,
            [x.value for x in grads.squared_norms(parts)],
            bound,
            grads.weighted_sum(coefs, keep, parts, arithmetic),
        )

    def run(batch: Any, coefs: Any = None, keep: Any = None) -> Output:
        ones = np.ones((len(params), _SIZE), np.float32)
        coefs = list(ones if coefs is None else coefs)
        return compute(batch, coefs, np.ones(_SIZE, bool) if keep is None else keep)

    batch = _make_batch(model, 3)
    return Case(model, dtype, batch, *_gradients(model, dtype), run)


# Models, dtypes and variants in pairs; each engine has every dtype.
_ZOO = models.ZOO
_CASES = [
    ("per_example", "mlp", "float32"),
    ("per_example", "conv", "float16"),
    ("per_example-scaled", "mlp", "bfloat16"),
    ("book_keeping", "mlp", "float16"),
    ("book_keeping-scaled", "mlp", "bfloat16"),
    ("book_keeping-bounded", "conv", "float32"),
    ("book_keeping", "lstm", "float32"),
    ("book_keeping", "weight_norm", "bfloat16"),
    ("book_keeping", "regularised", "float32"),
    ("book_keeping", "control_flow", "float32"),
]
# Half precision is much the same for models that are much the same.
_SLOW_CASES = [
    *((name, "float32") for name in _ZOO),
    *((name, "bfloat16") for name in ("conv", "lstm", "transformer")),
    *((name, "bfloat16") for name in ("nested_loops", "decoder-scan-remat-tied")),
    ("weight_norm", "float16"),
]


# Of module scope, so that the tests of a case come one after another.
@pytest.fixture(
    scope="module",
    params=[
        *_CASES,
        *(
            pytest.param(("book_keeping", *x), marks=pytest.mark.slow)
            for x in _SLOW_CASES
            if ("book_keeping", *x) not in _CASES
        ),
    ],
    ids="-".join,
)
def case(request):
    name, model, dtype = request.param
    return _make_case(_VARIANTS[name], _ZOO[model], dtype)


def _all_but(*numbers):
    return ~np.isin(np.arange(_SIZE), numbers)


def _assert_same(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_values_are_losses_and_aux_has_an_axis_of_examples(case):
    output = case.run(case.batch)
    rtol = _LOSS_ERROR[case.dtype]
    np.testing.assert_allclose(output.values, case.losses, rtol=rtol)
    np.testing.assert_array_equal(output.aux["weight"], case.batch["weight"])
    squares = np.square(output.values)
    np.testing.assert_allclose(output.aux["square"], squares, rtol=1e-6)


def test_squared_norms_are_those_of_the_gradients_of_each_group(case):
    output = case.run(case.batch)
    pairs = [(output.norms, lambda tree: tree)]
    for norms, name in zip(output.norms_of_groups, sorted(case.wide), strict=True):
        pairs.append((norms, lambda tree, name=name: tree[name]))
    for squares, part in pairs:
        expected, of_vmap = (
            reference.per_example_norms(part(x)) for x in (case.wide, case.stack)
        )
        if not np.any(expected):  # of a parameter that the loss does not use
            assert not np.any(squares)
            continue
        error, allowed = (
            np.linalg.norm(x / expected - 1) / math.sqrt(_SIZE)
            for x in (np.sqrt(squares), of_vmap)
        )
        assert error <= _FLOAT32_ERROR + _NORMS_BY_CHANCE * allowed


def _weighted_sum(stack, coefs, keep):
    def of_group(group, coefs):
        return jax.tree.map(
            lambda x: np.einsum(
                "i...,i->...",
                reference.float64_values(x)[keep],
                np.float64(coefs[keep]),
            ),
            group,
        )

    names = sorted(stack)
    return {k: of_group(stack[k], c) for k, c in zip(names, coefs, strict=True)}


def test_a_sum_weights_each_group_and_example(case):
    shape = len(case.wide), _SIZE
    coefs = np.random.default_rng(0).uniform(0.5, 2.0, shape).astype(np.float32)
    keep = _all_but(1, 4)
    total = case.run(case.batch, coefs, keep).total
    expected, of_vmap = (
        _weighted_sum(stack, coefs, keep) for stack in (case.wide, case.stack)
    )
    for actual, wide, by_vmap in zip(
        *map(jax.tree.leaves, (total, expected, of_vmap)), strict=True
    ):
        assert actual.dtype == jnp.float32
        if not np.any(wide):
            assert not np.any(actual)
            continue
        allowed = _FLOAT32_ERROR + _WEIGHTING_ERROR[case.dtype]
        assert reference.relative_distance(
            actual, wide
        ) <= allowed + _BY_CHANCE * reference.relative_distance(by_vmap, wide)
    of_nobody = case.run(case.batch, coefs, np.zeros(_SIZE, bool)).total
    assert not reference.exact_squared_norm(of_nobody)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -3e38])
def test_an_example_that_is_not_kept_contributes_nothing_whatever_it_holds(case, bad):
    coefs = np.full((len(case.wide), _SIZE), 0.75, np.float32)
    keep = _all_but(3)
    expected = case.run(case.batch, coefs, keep)
    weight = np.where(keep, case.batch["weight"], np.float32(bad))
    spoiled = {**case.batch, "weight": weight}
    coefs[:, 3] = bad
    output = case.run(spoiled, coefs, keep)
    assert np.isfinite(reference.norm(output.total))
    _assert_same(output.total, expected.total)
    for actual, of_others in zip(output[:4], expected[:4], strict=True):
        for x, y in zip(*map(jax.tree.leaves, (actual, of_others)), strict=True):
            np.testing.assert_array_equal(x[..., keep], y[..., keep])
    assert not np.isfinite(output.norms[3])


def test_a_contribution_is_at_most_its_bound(case):
    # Book-keeping rounds the sum too.
    slack = Fraction(1) + Fraction(1, 10**6)
    for i in range(_SIZE):
        output = case.run(case.batch, keep=~_all_but(i))
        squared = reference.exact_squared_norm(output.total)
        assert squared <= slack * Fraction(float(output.bound[i]))
        # Bounds clip hardly more than they must.
        assert np.sqrt(float(squared)) >= 0.98 * np.sqrt(float(output.bound[i]))


def test_no_bit_of_an_example_depends_on_the_others(case):
    is_kept = np.arange(_SIZE) % 2 == 0
    mixed = jax.tree.map(
        lambda x, y: np.where(is_kept.reshape(-1, *[1] * (x.ndim - 1)), x, y),
        case.batch,
        _make_batch(case.model, 4),
    )
    for i in np.flatnonzero(is_kept):
        first, second = (
            case.run(batch, keep=~_all_but(i)) for batch in (case.batch, mixed)
        )
        _assert_same(second.total, first.total)
        for a, b in zip(second[:5], first[:5], strict=True):
            _assert_same(*(jax.tree.map(lambda x, i=i: x[i], y) for y in (a, b)))


# A cheap loss, for arguments and dtypes.


def _loss(params, batch):
    rows = params["table"][batch["ids"]]
    return jnp.mean(jnp.tanh((batch["x"] * rows) @ params["w"] + params["b"]))


_rng = np.random.default_rng(0)
_PARAMS = {
    name: np.float32(_rng.normal(size=shape))
    for name, shape in {"table": (5, 3), "w": (3, 2), "b": (2,)}.items()
}
_BATCH = {
    "x": _rng.normal(size=(_SIZE, 4, 3)).astype(np.float32),
    "ids": _rng.integers(5, size=(_SIZE, 4)).astype(np.int32),
}


def _sum(grads, variant, width="float32"):
    keep, coefs = jnp.full(_SIZE, True), jnp.ones(_SIZE, width)
    prefix = jax.tree.structure(0)
    return grads.weighted_sum([coefs], keep, prefix, variant.arithmetic(width))


def _run(variant, loss, args, width="float32", **roles):
    """The auxiliary outputs, norms and sum of an engine, from one program."""
    engine = variant.make(loss, **roles)

    @jax.jit
    def compute(args):
        grads = engine(*args)
        (norm,) = grads.squared_norms(jax.tree.structure(0))
        return grads.aux, jnp.sqrt(norm.value), _sum(grads, variant, width)

    return compute(args)


def _assert_sum_of_grads(total, loss, args, argnums=0, batch_argnums=1, rtol=None):
    """Compares with the gradient of the sum of all losses."""
    batch_argnums = np.atleast_1d(batch_argnums)

    def sum_of_losses(*args):
        in_axes = [0 if i in batch_argnums else None for i in range(len(args))]
        return jnp.sum(jax.vmap(loss, in_axes)(*args))

    expected = jax.jit(jax.grad(sum_of_losses, argnums))(*args)
    assert jax.tree.structure(total) == jax.tree.structure(expected)
    reference.assert_trees_close(total, expected, rtol=rtol or 4 * _FLOAT32_ERROR)


@pytest.mark.parametrize(
    ("variant", "keep_batch_dim"),
    [(Variant("per_example"), True), (Variant("book_keeping"), False)],
)
def test_aux_that_is_no_part_of_the_gradient_has_one_axis_more(variant, keep_batch_dim):
    seen = []

    def loss(params, batch):
        seen.append(batch["x"].shape)
        aux = {"ids": batch["ids"], "py": 1.0, "param": params["w"], "none": None}
        return _loss(params, batch), aux | {"square": jnp.sum(params["b"] ** 2)}

    roles = {"has_aux": True, "keep_batch_dim": keep_batch_dim}
    aux, _, total = _run(variant, loss, (_PARAMS, _BATCH), **roles)
    assert set(seen) == {(1, 4, 3) if keep_batch_dim else (4, 3)}
    _assert_sum_of_grads(total, _loss, (_PARAMS, _BATCH))
    assert aux["none"] is None
    shapes = {"ids": (4,), "py": (), "param": (3, 2), "square": ()}
    for name, shape in shapes.items():
        assert jnp.shape(aux[name]) == (_SIZE, *shape)
    np.testing.assert_array_equal(aux["ids"], _BATCH["ids"])
    np.testing.assert_array_equal(aux["param"][0], _PARAMS["w"])


@pytest.mark.parametrize(
    ("variant", "argnums"),
    [(Variant("per_example"), 1), (Variant("book_keeping"), (1, 3))],
)
def test_any_arguments_are_differentiated_and_others_reach_every_example(
    variant, argnums
):
    def loss(x, w, ids, rest, frozen, *, scale, name):
        assert name == "kept"
        params = {"w": w, **rest, "b": rest["b"] + frozen}
        return scale * _loss(params, {"x": x, "ids": ids})

    @jax.jit
    def summed(args, scale):
        engine = variant.make(loss, argnums=argnums, batch_argnums=(0, 2))
        return _sum(engine(*args, scale=scale, name="kept"), variant)

    rest = {"table": _PARAMS["table"], "b": _PARAMS["b"]}
    args = _BATCH["x"], _PARAMS["w"], _BATCH["ids"], rest, np.float32([0.5, -1.0])
    scale = np.float32(1.5)
    of_args = functools.partial(loss, scale=scale, name="kept")
    _assert_sum_of_grads(summed(args, scale), of_args, args, argnums, (0, 2))


@_BOTH
def test_parameters_may_be_numbers_and_numpy_arrays(variant):
    engine = variant.make(lambda w, x: jnp.mean((x - w) ** 2) / 2)

    @jax.jit
    def compute(x):
        outputs = [engine(w, x) for w in (3.0, np.float32(3.0))]
        prefix = jax.tree.structure(0)
        return [(x.squared_norms(prefix)[0].value, _sum(x, variant)) for x in outputs]

    for squares, total in compute(np.float32([0.0, 7.0, -2.0, 3.0, 4.0, 2.0])):
        np.testing.assert_allclose(squares, [9.0, 16.0, 25.0, 0, 1, 1], rtol=1e-6)
        np.testing.assert_allclose(total, 4.0, rtol=1e-5)


@_BOTH
def test_float64_models_stay_float64(variant):
    with jax.enable_x64(True):
        params, x = jax.tree.map(np.float64, (_PARAMS, _BATCH["x"]))
        batch = {**_BATCH, "x": x}
        _, norms, total = _run(variant, _loss, (params, batch), width="float64")
        assert norms.dtype == jnp.float64
        # Above the errors of float32.
        _assert_sum_of_grads(total, _loss, (params, batch), rtol=1e-12)
        stack = jax.jit(jax.vmap(jax.grad(_loss), in_axes=(None, 0)))(params, batch)
        expected = reference.per_example_norms(stack)
        np.testing.assert_allclose(norms, expected, rtol=1e-12)
