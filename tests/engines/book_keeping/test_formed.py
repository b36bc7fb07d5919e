"""Gradients that the backward pass forms, so that nothing is recorded for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import FLOAT_SUMS, assert_trees_close

import dpmp
from dpmp.engines.book_keeping._engine import analyse
from dpmp.engines.book_keeping._relative_cost import relative_cost

_LAYERS, _POSITIONS, _WIDTH, _RANK = 3, 64, 16, 2
_rng = np.random.default_rng(0)


def _normal(*shape, dtype=jnp.float32):
    return jnp.asarray(_rng.normal(size=shape) / 4, dtype)


def _layer(x, factors):
    """A layer with a change of low rank: its gradients are smaller than its inputs."""
    return jnp.tanh(x + (x @ factors["a"]) @ factors["b"])


def _over_layers(body):
    def loss(params, x):
        x = x.astype(params["a"].dtype)
        x, _ = jax.lax.scan(lambda x, factors: (body(x, factors), None), x, params)
        return jnp.sum(jnp.square(x.astype(jnp.float32)))

    return loss


def _one_layer(params, x):
    return jnp.sum(_layer(x, jax.tree.map(lambda w: w[0], params)) ** 2)


def _after_a_tap(params, x):
    """Its first site is another one: the whole view, before it is used."""
    x = jax.lax.cond(
        x[0, 0] > 0, lambda x, b: x + b, lambda x, b: x - b, x, params["c"]
    )
    return _over_layers(jax.checkpoint(_layer))({"a": params["a"], "b": params["b"]}, x)


def _carried(params, x):
    """The loop changes a view that it carries, which is tapped whole."""

    def body(state, factors):
        x, bias = state
        return (_layer(x, factors) + bias, bias / 2), None

    factors = {name: params[name] for name in ("a", "b")}
    (x, _), _ = jax.lax.scan(body, (x, params["c"]), factors)
    return jnp.sum(x**2)


def _tangled(params, x):
    """With bounded sums, the second parameter is tapped whole, before all others."""
    x = x @ params["w"] ** 2
    factors = {name: params[name] for name in ("a", "b")}
    return _over_layers(jax.checkpoint(_layer))(factors, x)


def _nested(params, x):
    """A loop over groups of layers, and another loop after it."""

    def group(x, factors):
        x, _ = jax.lax.scan(lambda x, f: (_layer(x, f), None), x, factors)
        return x

    grouped = {name: params[name] for name in ("a", "b")}
    x, _ = jax.lax.scan(lambda x, f: (jax.checkpoint(group)(x, f), None), x, grouped)
    return _over_layers(_layer)({"a": params["a2"], "b": params["b2"]}, x)


def _rows_and_columns(params, x):
    """The numbers of rows are recorded, which have no cotangent."""
    rows = jnp.int32(x[:, 0] > 0)
    return jnp.sum(jnp.tanh(params["rows"][rows] * x[:, :2]) ** 2)


def _shared(params, x):
    """All iterations have one view, so that each would add to a gradient in memory."""

    def body(x, _):
        return _layer(x, params), None

    x, _ = jax.lax.scan(body, x, None, length=_LAYERS)
    return jnp.sum(x**2)


def _factors(*axes, dtype=jnp.float32):
    shapes = {"a": (*axes, _WIDTH, _RANK), "b": (*axes, _RANK, _WIDTH)}
    return {name: _normal(*shape, dtype=dtype) for name, shape in shapes.items()}


_STACKED = _factors(_LAYERS)
_CASES = {
    "one layer": (_one_layer, _STACKED),
    "loop": (_over_layers(_layer), _STACKED),
    "checkpoints": (_over_layers(jax.checkpoint(_layer)), _STACKED),
    "checkpoint of a loop": (jax.checkpoint(_over_layers(_layer)), _STACKED),
    "bfloat16": (
        _over_layers(jax.checkpoint(_layer)),
        _factors(_LAYERS, dtype=jnp.bfloat16),
    ),
    "after a tap": (_after_a_tap, {**_STACKED, "c": _normal(_WIDTH)}),
    "carried": (_carried, {**_STACKED, "c": _normal(_WIDTH)}),
    "tangled": (_tangled, {**_STACKED, "w": _normal(_WIDTH, _WIDTH)}),
    "nested": (
        _nested,
        {**_factors(2, _LAYERS), **{f"{k}2": x for k, x in _STACKED.items()}},
    ),
    "rows": (_rows_and_columns, {"rows": _normal(2, 2)}),
    "shared": (_shared, _factors()),
}
_BATCH = _normal(5, _POSITIONS, _WIDTH)


@pytest.mark.parametrize("is_bounded", [False, True])
@pytest.mark.parametrize("name", [x for x in _CASES if x != "tangled"])
def test_nothing_is_recorded_but_gradients(name, is_bounded):
    loss, params = _CASES[name]
    program = _analyse(loss, params, is_bounded)
    are_dense = [site.outer is None for site in program.plan.sites]
    assert are_dense == [name != "shared"] * len(are_dense)
    forms = [term.form for term in program.terms]
    assert forms.count("kept") == sum(name != "c" for name in params)
    assert all(site.outer is None for site in program.sites)


def test_parameters_may_be_tapped_before_all_others():
    program = _analyse(*_CASES["tangled"], is_bounded=True)
    assert [site.rule for site in program.plan.sites] == ["whole", "dot", "dot"]
    assert [site.outer is None for site in program.plan.sites] == [True] * 3


def _analyse(loss, params, is_bounded):
    return analyse(
        lambda *args: (loss(*args), None), params, _BATCH[0], is_bounded=is_bounded
    )


def test_estimates_of_costs_count_the_products_of_formed_gradients():
    def mlp(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    shapes = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 3
    few, many = (
        relative_cost(mlp, shapes, jax.ShapeDtypeStruct((n, 64), jnp.float32))
        for n in (128, 1024)
    )
    assert 1.2 < many < few < 1.5


@pytest.mark.parametrize("arithmetic", ["bounded", FLOAT_SUMS["book_keeping"]])
@pytest.mark.parametrize("name", _CASES)
def test_sums_and_norms_are_those_of_per_example_gradients(name, arithmetic):
    loss, params = _CASES[name]
    kinds = {"per_example": FLOAT_SUMS["per_example"], "book_keeping": arithmetic}
    sums, norms = [], []
    for method, kind in kinds.items():
        clip = dpmp.clipped_grad(
            loss,
            l2_clip_norm=1000.0,
            keep_batch_dim=False,
            method=method,
            arithmetic=kind,
            return_grad_norms=True,
        )
        total, aux = jax.jit(clip.__call__)(params, _BATCH)
        sums.append(jax.tree.map(_as_array, total, is_leaf=_is_grid_array))
        norms.append(aux.grad_norms)
    rtol = 0.02 if name == "bfloat16" else 1e-5 if arithmetic != "bounded" else 1e-3
    assert_trees_close(*sums, rtol=rtol)
    assert_trees_close(*norms, rtol=0.02 if name == "bfloat16" else 1e-5)


def _is_grid_array(x):
    return isinstance(x, dpmp.GridArray)


def _as_array(x):
    return np.asarray(x.to_float() if _is_grid_array(x) else x)
