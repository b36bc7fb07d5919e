"""Summaries say what book-keeping does, and warn where it does what it should avoid."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import models
import more_models
import pytest

import dpmp
from dpmp.engines.book_keeping import Summary, _engine, summarize

ZOO = {model.name: model for model in (*models.ZOO, *more_models.PARAMETER_USES)}


@pytest.fixture(params=ZOO)
def model(request):
    return ZOO[request.param]


def _shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), tree)


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


@functools.cache
def _of_model(name):
    model = ZOO[name]
    return _quietly(model.loss, model.init(jnp.float32), model.make_batch(0, 4))


def test_a_row_says_what_is_known_of_a_parameter():
    rows = _rows(
        summarize(_linear, _params(w=(300, 200), b=(200,)), _batch(9, 10, 300))
    )
    w, b = rows["['w']"], rows["['b']"]
    assert (w.shape, w.num_entries) == ((300, 200), 60_000)
    assert (w.rules, w.forms) == (("dot",), ("gram",))
    assert (b.rules, b.forms) == (("add",), ("entries",))
    # Inner products of ten positions with each other, on either side.
    assert 100 * 500 <= w.cost <= 2 * 100 * 500
    assert w.share == w.cost / (w.cost + b.cost)


def test_the_form_follows_the_shape():
    params = _params(w=(8, 8), b=(8,))
    long = _rows(summarize(_linear, params, _batch(2, 1000, 8)))
    short = _rows(summarize(_linear, params, _batch(2, 1, 8)))
    assert long["['w']"].forms == ("kept",)
    assert short["['w']"].forms == ("gram",)


def test_every_parameter_has_one_row(model):
    params = model.init(jnp.float32)
    rows = _of_model(model.name).rows
    leaves = jax.tree_util.tree_leaves_with_path(params)
    assert [row.path for row in rows] == [jax.tree_util.keystr(k) for k, _ in leaves]
    assert [row.shape for row in rows] == [x.shape for _, x in leaves]
    assert [row.num_entries for row in rows] == [x.size for _, x in leaves]


def test_only_parameters_without_influence_have_no_rule(model):
    names = {"decoder-tied": "head", "decoder-scan-remat-tied": "head"}
    names |= {"shared": "unused", "control_flow": "unused"}
    for row in _of_model(model.name).rows:
        is_used = row.path != f"['{names.get(model.name)}']"
        assert [bool(x) for x in (row.rules, row.forms, row.cost)] == [is_used] * 3


def test_shares_add_up(model):
    summary = _of_model(model.name)
    assert sum(row.share for row in summary.rows) == pytest.approx(1)
    for row in summary.rows:
        assert row.share == pytest.approx(row.cost / summary.cost)


@pytest.mark.parametrize("arithmetic", ["unproved_float32", "bounded"])
def test_summaries_say_what_the_engine_does(model, arithmetic, monkeypatch):
    params, batch = model.init(jnp.float32), model.make_batch(0, 4)
    rows = _quietly(model.loss, params, batch, arithmetic=arithmetic).rows
    program = _program_of_engine(
        monkeypatch, model.loss, params, batch, arithmetic=arithmetic
    )
    for root, row in enumerate(rows):
        terms = [x for x in program.terms if root in x.params]
        sites = [x for x in program.plan.sites if root in x.view.leaves]
        assert row.forms == tuple(term.form for term in terms)
        assert row.rules == tuple(site.rule for site in sites)


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


def test_arguments_without_an_example_axis_are_constants_as_in_the_engine(monkeypatch):
    def loss(params, batch, frozen):
        return jnp.mean(batch @ (frozen + params["a"] @ params["b"]))

    args = _params(a=(6, 2), b=(2, 5)), _batch(4, 3, 6), _batch(6, 5)
    options = {"arithmetic": "unproved_float32"}
    program = _program_of_engine(monkeypatch, loss, *args, **options)
    assert [site.rule for site in program.plan.sites] == ["dot"]
    rows = _quietly(loss, *args, **options).rows
    assert all(row.rules == ("dot",) for row in rows)


def test_shapes_are_enough(model):
    params, batch = model.init(jnp.float32), model.make_batch(0, 4)
    summary = _quietly(model.loss, _shapes(params), _shapes(batch))
    assert summary == _of_model(model.name)


def test_nothing_is_computed():
    params = _params(w=(2**15, 2**15), b=(2**15,))
    summary = summarize(_linear, params, _batch(2**20, 128, 2**15))  # 16 terabytes
    assert summary.num_entries == 2**30 + 2**15


def test_the_batch_size_does_not_matter():
    params = _params(w=(8, 8), b=(8,))
    assert summarize(_linear, params, _batch(1, 8)) == summarize(
        _linear, params, _batch(512, 8)
    )


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


def test_keys_and_numbers_are_arguments_too():
    def loss(w, x, key, is_training):
        assert is_training is True
        return jnp.mean(w * x * jax.random.normal(key, x.shape))

    (row,) = summarize(loss, 3.0, jnp.ones(4), jax.random.key(0), True).rows
    assert (row.path, row.shape, row.rules) == ("", (), ("mul",))


def test_the_table_has_a_line_for_each_row_and_their_sums(model):
    summary = _of_model(model.name)
    header, *lines, total = str(summary).splitlines()
    assert len(lines) == len(summary.rows)
    for line, row in zip(lines, summary.rows, strict=True):
        cells = re.split(r"  +", line)
        assert cells[0] == row.path
        assert cells[1] == str(row.shape)
        assert int(cells[2].replace(",", "")) == row.num_entries
        assert cells[-1] == f"{row.share:.1%}"
    name, num_entries, cost = total.split()
    assert name == "total"
    assert num_entries == f"{sum(row.num_entries for row in summary.rows):,}"
    assert cost == f"{sum(row.cost for row in summary.rows):,.0f}"
    # The columns of numbers end where their names do.
    for name, text in (("entries", num_entries), ("cost", cost)):
        assert header.index(name) + len(name) == total.index(text) + len(text)
    assert all(line == line.rstrip() for line in (header, *lines, total))


def test_several_sites_are_counted():
    def loss(params, batch):
        x = batch
        for w in params["w"]:
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    line = str(summarize(loss, _params(w=(3, 6, 6)), _batch(2, 6))).splitlines()[1]
    assert "3 dot" in line
    assert "3 gram" in line


def test_a_parameter_that_is_the_argument_has_a_name():
    table = str(summarize(lambda w, x: jnp.mean(x @ w), _batch(4, 3), _batch(9, 4)))
    assert table.splitlines()[1].startswith("(itself)")


def test_warns_of_gradients_that_are_sent_back_to_parameters():
    def loss(params, batch):
        return _linear(params, batch) + jnp.sum(jnp.square(params["w"]))

    with pytest.warns(UserWarning, match=r"\['w'\] .* 99% .* optimizer") as record:
        summary = summarize(
            loss,
            _params(w=(8, 8), b=(8,)),
            _batch(2, 8),
            arithmetic="unproved_float32",
        )
    assert record[0].filename == __file__
    assert _rows(summary)["['w']"].forms == ("parameters",)


def test_bounded_sums_form_what_is_computed_from_parameters():
    def loss(params, batch):
        return _linear({"w": jnp.tanh(params["w"]), "b": params["b"]}, batch)

    args = _params(w=(256, 256), b=(256,)), _batch(2, 256)
    with pytest.warns(UserWarning, match=r"\['w'\] .* branches.* computed from"):
        rows = _rows(summarize(loss, *args, arithmetic="bounded"))
    assert rows["['w']"].rules == ("whole",)
    rows = _rows(_quietly(loss, *args, arithmetic="unproved_float32"))
    assert rows["['w']"].rules == ("dot",)


def _branching(params, batch):
    x = jax.lax.cond(
        jnp.sum(batch) > 0, jnp.matmul, lambda x, w: x - w[0], batch, params
    )
    return jnp.mean(x)


def test_warns_of_large_parameters_that_are_tapped_whole():
    with pytest.warns(UserWarning, match=r"\(itself\) .* 100% .* branches"):
        (row,) = summarize(_branching, _batch(256, 256), _batch(2, 256)).rows
    assert (row.rules, row.forms) == (("whole",), ("entries",))


def test_does_not_warn_of_small_parameters_that_are_tapped_whole():
    (row,) = summarize(_branching, _batch(8, 8), _batch(2, 8)).rows  # warnings raise
    assert row.rules == ("whole",)


def test_does_not_warn_of_what_takes_less_than_half():
    def loss(params, batch):
        return _branching(params["w"], batch[:, 0]) + jnp.mean(batch @ params["large"])

    params = _params(w=(256, 256), large=(256, 4096))
    summary = summarize(loss, params, _batch(2, 256, 256))  # warnings raise
    row = _rows(summary)["['w']"]
    assert row.rules == ("whole",)
    assert 0 < row.share < 0.5


def test_a_gradient_that_is_formed_for_lack_of_a_rule_costs_more_than_its_norm():
    def loss(params, batch):
        return _branching(params["w"], batch) + jnp.mean(batch + params["v"])

    params = _params(w=(8, 8), v=(8, 8))
    rows = _rows(summarize(loss, params, jax.ShapeDtypeStruct((2, 8, 8), jnp.float32)))
    assert rows["['w']"].cost > 2 * rows["['v']"].cost


def test_does_not_warn_of_parameters_that_are_used_often():
    def loss(w, batch):
        x = batch
        for _ in range(3):
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    (row,) = summarize(loss, _batch(4, 4), _batch(2, 500, 4)).rows  # warnings raise
    assert (row.rules, row.forms) == (("dot",) * 3, ("parameters",))


def _never(*args, **kwargs):
    raise AssertionError("traced")


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"argnums": -1}, "argnums must be"),
        ({"argnums": ()}, "argnums must be"),
        ({"batch_argnums": 1.0}, "batch_argnums must be"),
        ({"argnums": 1}, "must not overlap"),
        ({"argnums": (0, 0)}, "must not overlap"),
        ({"argnums": 2}, "at least 3 positional arguments"),
        ({"batch_argnums": (1, 4)}, "at least 5 positional arguments"),
        ({"argnums": 1, "batch_argnums": 0}, "argument 1 must be a real float"),
    ],
)
def test_refuses_argument_numbers_that_do_not_fit(kwargs, match):
    tokens = jax.ShapeDtypeStruct((4, 5), jnp.int32)
    with pytest.raises(ValueError, match=match):
        summarize(_never, _batch(4, 4), tokens, **kwargs)


def test_refuses_batches_without_one_size():
    with pytest.raises(ValueError, match="one leading axis of the same size"):
        summarize(_never, _batch(4), {"x": _batch(3, 4), "y": _batch(2)})
    with pytest.raises(ValueError, match="one leading axis of the same size"):
        summarize(_never, _batch(4), 1.0)


@pytest.mark.parametrize("name", ["exact", "float32", "float128"])
def test_refuses_arithmetics_that_do_not_go_with_book_keeping(name):
    with pytest.raises(
        ValueError, match=r'must be used with method="per_example"|must be one of'
    ):
        summarize(_never, _batch(4), _batch(9, 4), arithmetic=name)


def test_what_meets_only_the_key_has_the_rule_of_the_engine(monkeypatch):
    def loss(params, batch, key):
        noise = jax.random.normal(key, (3, 6))
        return jnp.mean((noise @ params["w"]) ** 2) + 0 * jnp.sum(batch)

    params, batch = _params(w=(6, 2)), _batch(4, 3)
    options = {"prng_argnum": 2}
    args = params, batch, jax.random.key(0)
    program = _program_of_engine(monkeypatch, loss, *args, **options)
    (row,) = summarize(loss, *args, **options).rows  # warnings raise
    assert row.rules == tuple(site.rule for site in program.plan.sites) == ("dot",)


def test_refuses_losses_that_are_not_one_number():
    with pytest.raises(ValueError, match="scalar float loss"):
        summarize(lambda w, x: x @ w, _batch(4, 3), _batch(9, 4))
    with pytest.raises(ValueError, match=r"a pair \(value, aux\)"):
        summarize(lambda w, x: jnp.sum(x @ w), _batch(4), _batch(9, 4), has_aux=True)


def test_a_summary_cannot_be_changed():
    summary = Summary(())
    with pytest.raises(AttributeError):
        summary.rows = ()  # pyright: ignore[reportAttributeAccessIssue]
