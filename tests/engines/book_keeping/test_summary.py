"""Summaries say what book-keeping does, and warn where it does what it should avoid."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import ZOO

import dpmp
from dpmp.engines.book_keeping import (
    _engine,
    measure_condition_numbers,
    summarize,
)


def _quietly(*args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return summarize(*args, **kwargs)


def _linear(params, batch):
    return jnp.mean(jnp.tanh(batch @ params["w"] + params["b"]))


def _params(**shapes):
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()
    }


def _batch(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _rows(summary):
    return {row.path: row for row in summary.rows}


def test_a_row_says_what_is_known_of_a_parameter():
    rows = _rows(
        summarize(_linear, _params(w=(300, 200), b=(200,)), _batch(9, 10, 300))
    )
    w, b = rows["['w']"], rows["['b']"]
    assert (w.shape, w.num_entries) == ((300, 200), 60_000)
    assert (w.rules, w.forms) == (("dot",), ("gram",))
    assert (b.rules, b.forms) == (("add",), ("entries",))
    # Inner products of ten positions with each other, on either side.
    assert 100 * 500 <= w.flops <= 2 * 100 * 500
    assert w.share == w.flops / (w.flops + b.flops)


@pytest.mark.parametrize(
    ("name", "arithmetic"),
    [
        ("transformer", "bounded"),
        ("group_norm_cnn", "bounded"),
        ("weight_norm", "bounded"),
        ("decoder-scan-remat-tied", "unproved_float32"),
        ("control_flow", "unproved_float32"),
    ],
)
def test_summaries_say_what_the_engine_does_from_shapes_alone(
    name, arithmetic, monkeypatch
):
    loss, args = ZOO[name].loss, (ZOO[name].init("float32"), ZOO[name].make_batch(0, 4))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    summary = _quietly(loss, *shapes, arithmetic=arithmetic)
    program = _program_of_engine(monkeypatch, loss, *args, arithmetic=arithmetic)
    leaves = jax.tree_util.tree_leaves_with_path(args[0])
    for i, (row, (path, leaf)) in enumerate(zip(summary.rows, leaves, strict=True)):
        methods = [x for x in program.norm_methods if i in x.params]
        uses = [x for x in program.plan.uses if i in x.view.leaves]
        assert row.path == jax.tree_util.keystr(path)
        assert (row.shape, row.num_entries) == (leaf.shape, leaf.size)
        assert row.forms == tuple(method.form for method in methods)
        assert row.rules == tuple(use.rule for use in uses)
        assert row.share == pytest.approx(row.flops / summary.flops)
        assert bool(row.flops) == bool(uses)
    assert sum(row.share for row in summary.rows) == pytest.approx(1)


class _AnalysedError(Exception):
    pass


def _program_of_engine(monkeypatch, loss, *args, **kwargs):
    """What the engine works with, under jax.jit."""
    programs, analyse = [], _engine.analyse

    def analyse_and_stop(*args, **kwargs):
        programs.append(analyse(*args, **kwargs))
        raise _AnalysedError

    grad_fn = dpmp.clipped_grad(loss, l2_clip_norm=1.0, method="book_keeping", **kwargs)
    with monkeypatch.context() as patch:
        patch.setattr(_engine, "analyse", analyse_and_stop)
        with pytest.raises(_AnalysedError):
            jax.eval_shape(grad_fn, *args)
    return programs[0]


def test_nothing_is_computed_and_the_batch_size_does_not_matter():
    params = _params(w=(2**15, 2**15), b=(2**15,))
    summary = summarize(_linear, params, _batch(2**20, 128, 2**15))  # 16 terabytes
    assert summary.num_entries == 2**30 + 2**15
    assert summary == summarize(_linear, params, _batch(1, 128, 2**15))


def test_arguments_mean_what_they_mean_to_clipped_grad():
    def loss(x, scale, w, bias, *, power):
        assert x.shape == (7, 8)
        return jnp.mean((scale * (x @ w) + bias["b"]) ** power), x

    summary = summarize(
        loss,
        _batch(3, 7, 8),
        2.0,
        jax.ShapeDtypeStruct((8, 5), jnp.float32),
        {"b": jnp.zeros(5)},
        argnums=(2, 3),
        batch_argnums=0,
        keep_batch_dim=False,
        has_aux=True,
        power=2,
    )
    assert [(row.path, row.rules) for row in summary.rows] == [
        ("[0]", ("dot",)),
        ("[1]['b']", ("add",)),
    ]


def test_warns_of_gradients_that_are_sent_back_to_parameters():
    def loss(params, batch):
        return _linear(params, batch) + jnp.sum(jnp.square(params["w"]))

    with pytest.warns(UserWarning, match=r"\['w'\] .* 99% .* optimizer") as record:
        summary = summarize(
            loss, _params(w=(8, 8), b=(8,)), _batch(2, 8), arithmetic="unproved_float32"
        )
    assert record[0].filename == __file__
    assert _rows(summary)["['w']"].forms == ("parameters",)


def test_bounded_sums_materialize_gradients_of_parameters_used_through_arithmetic():
    def loss(params, batch):
        return _linear({"w": jnp.tanh(params["w"]), "b": params["b"]}, batch)

    args = _params(w=(256, 256), b=(256,)), _batch(2, 256)
    with pytest.warns(UserWarning, match=r"\['w'\] .* while loops.* computed from"):
        rows = _rows(summarize(loss, *args, arithmetic="bounded"))
    assert rows["['w']"].rules == ("identity",)
    rows = _rows(_quietly(loss, *args, arithmetic="unproved_float32"))
    assert rows["['w']"].rules == ("dot",)


@jax.custom_vjp
def _product(x, w):
    return x @ w


_product.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda saved, ct: (ct @ saved[1].T, saved[0].T @ ct)
)


def _without_rule(params, batch):
    return jnp.mean(_product(batch, params))


def test_warns_of_large_parameters_with_identity_taps():
    with pytest.warns(UserWarning, match=r"\(itself\) .* 100% .* custom"):
        (row,) = summarize(_without_rule, _batch(256, 256), _batch(2, 256)).rows
    assert (row.rules, row.forms) == (("identity",), ("entries",))


def _repeated(w, batch):
    for _ in range(3):
        batch = jnp.tanh(batch @ w)
    return jnp.mean(batch)


def _beside_a_product(params, batch):
    return _without_rule(params["w"], batch[:, 0]) + jnp.mean(batch @ params["large"])


@pytest.mark.parametrize(
    ("loss", "params", "batch", "rules", "forms"),
    [
        (_without_rule, _batch(8, 8), (2, 8), ("identity",), ("entries",)),
        (_repeated, _batch(4, 4), (2, 500, 4), ("dot",) * 3, ("parameters",)),
        (
            _beside_a_product,
            _params(w=(256, 256), large=(256, 4096)),
            (2, 256, 256),
            ("identity",),
            ("entries",),
        ),
    ],
    ids=["small", "used often", "less than half"],
)
def test_does_not_warn_of_others(loss, params, batch, rules, forms):
    row = summarize(loss, params, _batch(*batch)).rows[-1]  # warnings raise
    assert (row.rules, row.forms) == (rules, forms)
    assert (0 < row.share < 0.5) == isinstance(params, dict)


def _never(*args, **kwargs):
    raise AssertionError("traced")


@pytest.mark.parametrize(
    "function",
    [summarize, functools.partial(measure_condition_numbers, microbatch_size=1)],
)
@pytest.mark.parametrize(
    ("loss", "batch", "kwargs", "match"),
    [
        (_never, np.ones((4, 5)), {"argnums": -1}, "argnums must be"),
        (_never, np.ones((4, 5)), {"argnums": (0, 0)}, "must not overlap"),
        (_never, [np.ones(3), np.ones(2)], {}, "one leading axis of the same size"),
        (lambda w, x: x @ w, np.ones((9, 4)), {}, "scalar float loss"),
    ],
)
def test_arguments_and_losses_that_do_not_fit_are_refused(
    function, loss, batch, kwargs, match
):
    batch = jax.tree.map(np.float32, batch)
    with pytest.raises(ValueError, match=match):
        function(loss, np.ones((4, 4), np.float32), batch, **kwargs)
