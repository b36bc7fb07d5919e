"""What is said of programs that are known to be bad, and of one that is not."""

import inspect
import linecache
import math
import sys

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest

import dpmp
from dpmp.precision import Policy
from dpmp.tools.precision_report import precision_report

_ALARMS = {"running sum", "sum", "gradient sum", "exponential", "normalisation"}
_X = jax.ShapeDtypeStruct((64, 128), jnp.float32)
_W = jax.ShapeDtypeStruct((128,), jnp.float32)


def _line(text):
    """The line of this file that ends in a comment."""
    lines = inspect.getsource(sys.modules[__name__]).splitlines()
    (number,) = (i for i, x in enumerate(lines, 1) if x.endswith(f"# {text}"))
    return f"{__file__}:{number}"


def _found(fun, *args, **options):
    return {
        (x.kind, x.source): x for x in precision_report(fun, *args, **options).findings
    }


def _kinds(fun, *args, **options):
    return {kind for kind, _ in _found(fun, *args, **options)}


def _narrow_sum(x):
    return jax.lax.reduce_sum(x, (0, 1))  # narrow sum


def _in_jit(w, x):
    return jax.jit(_narrow_sum)(x * w)


def _in_scan(w, x):
    return jax.lax.scan(lambda c, _: (c, _narrow_sum(x * w)), 0, None, length=2)[
        1
    ].sum()


def _in_remat(w, x):
    return jax.checkpoint(lambda x: _narrow_sum(x * w))(x)


def _in_while(w, x):
    def body(state):
        return state[0] + 1, _narrow_sum(x * w)

    return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, w[0]))[1]


def _in_cond(w, x):
    return jax.lax.cond(w[0] > 0, lambda: _narrow_sum(x), lambda: w[0])


@jax.custom_vjp
def _with_rule(x):
    return _narrow_sum(x)


_with_rule.defvjp(lambda x: (_narrow_sum(x), x), lambda x, ct: (ct * x,))


def _in_custom_vjp(w, x):
    return _with_rule(x * w)


@jax.custom_jvp
def _with_tangent(x):
    return _narrow_sum(x)


_with_tangent.defjvp(lambda x, t: (_narrow_sum(*x), _narrow_sum(*t)))


def _in_custom_jvp(w, x):
    return _with_tangent(x * w)


_PROGRAMS = [
    _in_jit,
    _in_scan,
    _in_remat,
    _in_while,
    _in_cond,
    _in_custom_vjp,
    _in_custom_jvp,
]


@pytest.mark.parametrize("fun", _PROGRAMS, ids=lambda fun: fun.__name__)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_a_narrow_sum_is_found_at_its_line_wherever_it_is(fun, policy):
    found = _found(fun, _W, _X, policy=policy, differentiate=False)
    finding = found["sum", _line("narrow sum")]
    dtype = Policy.from_name(policy).compute_dtype
    assert (finding.primitive, finding.dtype) == ("reduce_sum", dtype.name)
    assert (finding.count, finding.length) == (1, 64 * 128)
    assert finding.bound == 64 * 128 * float(jnp.finfo(dtype).eps) / 2


@pytest.mark.parametrize("fun", _PROGRAMS, ids=lambda fun: fun.__name__)
def test_a_float32_program_has_nothing_to_change(fun):
    report = precision_report(
        fun, _W, _X, policy="float32", differentiate=fun is not _in_while
    )
    assert report.findings == ()
    assert "What to change\n  Nothing." in str(report)


def test_findings_of_one_line_and_kind_are_one():
    def fun(w, x):
        return _narrow_sum(x * w) + _narrow_sum(x)

    assert _found(fun, _W, _X)["sum", _line("narrow sum")].count == 2


def test_a_narrow_softmax_is_found():
    def fun(w, x):
        return jnp.max(jax.nn.softmax(x * w))  # softmax

    found = _found(fun, _W, _X, differentiate=False)
    assert {kind for kind, source in found if source == _line("softmax")} == {
        "exponential",
        "normalisation",
    }


def test_a_narrow_variance_is_found():
    def fun(w, x):
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        return jnp.max(centred * jax.lax.rsqrt(variance + 1e-6) * w)  # variance

    found = _found(fun, _W, _X, differentiate=False)
    assert list(found) == [("normalisation", _line("variance"))]


def _accumulate(w, x, dtype):
    def step(carry, row):
        return (carry + (row * w).astype(dtype)).astype(dtype), None  # carry

    return jnp.max(jax.lax.scan(step, jnp.zeros(128, dtype), x)[0])


def test_a_narrow_running_sum_is_found():
    finding = _found(lambda w, x: _accumulate(w, x, w.dtype), _W, _X)[
        "running sum", _line("carry")
    ]
    assert (finding.primitive, finding.length) == ("scan carry", 64)
    assert finding.bound == 64 * 2**-8


def test_a_running_sum_that_is_widened_and_rounded_again_is_found():
    def fun(w, x):
        def step(carry, row):
            wide = carry.astype(jnp.float32) + row.astype(jnp.float32)  # widened
            return wide.astype(carry.dtype), None

        return jnp.max(jax.lax.scan(step, w, x)[0])

    assert ("running sum", _line("widened")) in _found(fun, _W, _X)


def _dead_exponential(w, x):
    jnp.exp(x)
    return jnp.max(w)


def _nested_loops(w, x):
    """The inner loop adds the outer carry, but not its own."""

    def outer(carry, row):
        def inner(state, entry):
            return jnp.tanh(state) + carry, entry * state

        state, ys = jax.lax.scan(inner, row, x)
        return jnp.tanh(state) + jnp.tanh(jnp.max(ys, 0)), None

    return jnp.max(jax.lax.scan(outer, w, x)[0])


def _replaced_carry(w, x):
    return jnp.max(jax.lax.scan(lambda c, row: (jnp.tanh(c) * row, None), w, x)[0])


@pytest.mark.parametrize(
    ("fun", "differentiate"),
    [
        (lambda w, x: _narrow_sum(x[:3, :5]) * jnp.max(w), True),
        (lambda w, x: jnp.max(x / w), False),
        (lambda w, x: jnp.max(x) * jnp.max(w), True),
        (lambda w, x: _accumulate(w, x, jnp.float32), False),
        (_dead_exponential, True),
        (_replaced_carry, False),
        (_nested_loops, False),
    ],
    ids=["few terms", "no sum", "maximum", "float32", "dead", "replaced", "nested"],
)
def test_harmless_programs_raise_no_alarm(fun, differentiate):
    assert not _kinds(fun, _W, _X, differentiate=differentiate)


def test_a_loop_of_unknown_length_has_a_sum_of_unknown_length():
    def fun(w, x):
        def body(total):
            return total + w  # endless

        return jnp.max(jax.lax.while_loop(lambda t: t[0] < 9, body, w * 2))

    finding = _found(fun, _W, _X, differentiate=False)["running sum", _line("endless")]
    assert (finding.length, finding.bound) == (None, None)


def test_gradients_that_a_loop_adds_up_are_found():
    def fun(w, x):
        def step(carry, row):
            return jnp.tanh(carry * w + row), None  # recurrent

        return jnp.max(jax.lax.scan(step, jnp.zeros(128, w.dtype), x)[0])

    report = precision_report(fun, _W, _X)
    sums = [x for x in report.findings if x.kind == "running sum"]
    assert [(x.source, x.in_gradient) for x in sums] == [(_line("recurrent"), True)]


def test_long_chains_of_additions_are_found():
    def fun(w, x):
        return jnp.max(sum((x[i] for i in range(64)), w))  # chain

    finding = _found(fun, _W, _X, differentiate=False)["running sum", _line("chain")]
    assert finding.length == 65


def test_sums_that_gradients_scatter_are_found():
    def fun(table, tokens):
        return jnp.max(table[tokens])  # embedding

    tokens = jax.ShapeDtypeStruct((4, 128), jnp.int32)
    finding = _found(fun, _X, tokens)["running sum", _line("embedding")]
    assert (finding.primitive, finding.length) == ("scatter-add", 512)


def test_what_broadcasting_is_transposed_to_is_found():
    def fun(w, x):
        return jnp.max(x + w)  # bias

    finding = _found(fun, _W, _X)["gradient sum", _line("bias")]
    assert (finding.length, finding.in_gradient) == (64, True)


def test_a_cast_back_and_forth_is_found():
    def fun(w, x):
        wide = jnp.tanh(x.astype(jnp.float32))
        narrow = wide.astype(x.dtype)  # narrow
        return jnp.sum(narrow.reshape(-1).astype(jnp.float32))

    assert ("round trip", _line("narrow")) in _found(fun, _W, _X)


def test_a_cast_that_something_happens_after_is_no_round_trip():
    def fun(w, x):
        narrow = jnp.tanh(x.astype(jnp.float32)).astype(x.dtype)
        return jnp.max((narrow * w).astype(jnp.float32))

    assert "round trip" not in _kinds(fun, _W, _X)


def test_a_product_that_is_rounded_and_widened_is_found():
    def fun(w, x):
        return jnp.max((x @ x.T).reshape(-1).astype(jnp.float32))  # rounded

    found = _found(fun, _W, _X)["narrow product", _line("rounded")]
    assert found.length == 128

    def kept(w, x):
        return jnp.max(jnp.matmul(x, x.T, preferred_element_type=jnp.float32))

    assert _kinds(kept, _W, _X, differentiate=False) == set()


def test_products_are_counted_and_left_alone():
    report = precision_report(lambda w, x: jnp.max(jnp.tanh(x @ w)), _W, _X)
    assert [(x.kind, x.count) for x in report.findings] == [("product", 1)]
    assert "results: 1, of up to 128 terms" in str(report)
    assert "Nothing." in str(report)


def test_a_product_that_the_policy_does_not_reach_is_found():
    def fun(w, x):
        return jnp.max(x.astype(jnp.float32) @ w.astype(jnp.float32))  # wide

    report = precision_report(fun, _W, _X)
    kinds = [(x.kind, x.source, x.dtype) for x in report.findings]
    assert kinds == [("wide product", _line("wide"), "float32")]
    assert "No product is in 16 bits" in str(report)
    assert _kinds(fun, _W, _X, policy="float32") == set()


def test_parameters_that_are_only_widened_are_found():
    def fun(params, x):
        scale = params["scale"].astype(jnp.float32)  # scale
        return jnp.max(jnp.tanh(x * params["w"]).astype(jnp.float32) * scale)

    params = {"scale": _W, "w": _W}
    finding = _found(fun, params, _X)["parameter", _line("scale")]
    assert finding.primitive == "scale"
    policy = Policy.from_name("mixed_bfloat16", float32_paths=("scale",))
    assert "parameter" not in _kinds(fun, params, _X, policy=policy)


def test_inputs_that_are_only_widened_are_found():
    def fun(w, batch):
        y = batch["y"].astype(jnp.float32)  # target
        return jnp.max(y * jnp.max(w).astype(jnp.float32))

    (found,) = precision_report(fun, _W, {"y": _X}, differentiate=False).findings
    assert (found.kind, found.source) == ("input", _line("target"))
    assert found.primitive == "argument 1['y']"


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_a_transformer_with_float32_softmax_and_norms_raises_no_alarm(policy):
    model = models.TRANSFORMER
    params = jax.eval_shape(lambda: model.init(jnp.float32))
    tokens = jax.ShapeDtypeStruct((3, 6), jnp.int32)
    report = precision_report(model.loss, params, tokens, policy=policy)
    assert not {x.kind for x in report.findings} & _ALARMS
    assert any(x.kind == "product" for x in report.findings)


def test_autocast_leaves_no_alarm():
    def fun(w, x):
        return jnp.mean(jax.nn.softmax(jnp.tanh(x @ x.T)) ** 2) * jnp.var(w)

    assert _kinds(fun, _W, _X) & _ALARMS
    cast = dpmp.autocast(fun)
    assert _kinds(cast, _W, _X, policy="float32") == {"product"}


def _problem(size=2.0**-20):
    """A gradient from the size given down to 2^-40 of it, and zeros."""
    sizes = size * 2.0 ** -np.linspace(0, 40, 81)
    x = jnp.asarray([*sizes, 0, 0], jnp.float32)
    return (lambda w, x: jnp.sum(w.astype(jnp.float32) * x)), jnp.ones(83), x


def test_shares_are_those_of_numpy():
    _, w, x = _problem()

    def fun(w, x):
        # The input stays what it is, in a constant.
        return jnp.sum(w.astype(jnp.float32) * constant)

    constant = x
    report = precision_report(fun, w, jnp.zeros(1), policy="mixed_float16")
    exact = np.asarray(x)[:-2]
    for comparison in (report.comparison, report.suggested):
        rounded = (exact * comparison.loss_scale).astype(np.float16)
        shares = comparison.total.rounded
        assert shares.num_entries == 81
        assert shares.zero == np.mean(rounded == 0)
        tiny = np.finfo(np.float16).smallest_normal
        assert shares.subnormal == np.mean((rounded != 0) & (rounded < tiny))
        assert shares.overflow == 0
    assert (
        0 < report.suggested.total.rounded.zero < report.comparison.total.rounded.zero
    )


@pytest.mark.parametrize(
    ("size", "expected"),
    [(2.0**-20, 2.0**15), (1.0, 2.0**11), (2.0**14, 2.0**-3)],
    ids=str,
)
def test_the_suggested_scale_is_as_large_as_float16_allows(size, expected):
    _, w, constant = _problem(size)
    report = precision_report(
        lambda w, _: jnp.sum(w.astype(jnp.float32) * constant),
        w,
        jnp.zeros(1),
        policy="mixed_float16",
    )
    assert report.suggested.loss_scale == expected
    assert "Underflow: " in str(report) or size > 1


def test_the_suggested_scale_is_no_larger_than_it_has_to_be():
    constant = jnp.float32(2.0 ** -np.arange(10, 21))
    report = precision_report(
        lambda w, _: jnp.sum(w.astype(jnp.float32) * constant),
        jnp.ones(11),
        jnp.zeros(1),
        policy="mixed_float16",
    )
    # The smallest entry becomes 2^-14, the smallest normal number.
    assert report.suggested.loss_scale == 2.0**6
    assert report.suggested.total.rounded.lost == 0
    assert report.comparison.total.rounded.subnormal == 6 / 11


def test_an_overflow_is_told_and_a_scale_found():
    report = precision_report(
        lambda w, x: 3e5 * jnp.mean(w.astype(jnp.float32) * x.astype(jnp.float32)),
        jnp.ones(2),
        jnp.ones(2),
        policy="mixed_float16",
    )
    assert report.comparison.total.not_finite == 1.0
    assert report.comparison.total.rounded.overflow == 1.0
    assert report.suggested.total.not_finite == 0
    assert "Overflow: use loss_scale=2.0**-6" in str(report)


def test_an_overflow_of_the_loss_is_told():
    report = precision_report(
        lambda w, x: jnp.max(jnp.square(x * w) * w),
        jnp.ones(2),
        jnp.full(2, 300.0),
        policy="mixed_float16",
    )
    assert math.isinf(report.comparison.loss)
    assert "not finite at any loss scale" in str(report)


def test_the_policy_float32_changes_nothing():
    model = models.MLP
    args = model.init(jnp.float32), model.make_batch(0, 8)
    report = precision_report(model.loss, *args, policy="float32")
    comparison = report.comparison
    assert comparison.loss == comparison.float32_loss
    assert comparison.relative_difference == 0
    for x in (comparison.total, *comparison.parameters):
        assert x.cosine == pytest.approx(1.0, abs=1e-12)
        assert x.norm_ratio == 1.0
    assert comparison.exponents == comparison.float32_exponents
    assert report.suggested.loss_scale == 1.0


def test_bfloat16_is_compared():
    model = models.MLP
    args = model.init(jnp.float32), model.make_batch(0, 8)
    comparison = precision_report(model.loss, *args).comparison
    policy = Policy.from_name("mixed_bfloat16")
    grads, wide = (
        jax.tree.map(np.float64, jax.jit(jax.grad(model.loss))(*args))
        for args in (
            (policy.cast_to_compute(args[0]), policy.cast_inputs(args[1])),
            args,
        )
    )
    a, b = (
        np.concatenate([x.ravel() for x in jax.tree.leaves(t)]) for t in (grads, wide)
    )
    expected = a @ b / np.sqrt((a @ a) * (b @ b))
    assert comparison.total.cosine == pytest.approx(expected, abs=1e-5)
    assert comparison.total.norm_ratio == pytest.approx(
        np.sqrt(a @ a / (b @ b)), abs=1e-3
    )
    cosines = [x.cosine for x in comparison.parameters]
    assert cosines == sorted(cosines)
    assert {x.path for x in comparison.parameters} == {
        "hidden.w",
        "hidden.b",
        "out.w",
        "out.b",
    }
    exponents = np.floor(np.log2(np.abs(b[b != 0])))
    counts = dict(zip(*np.unique(exponents, return_counts=True), strict=True))
    assert dict(comparison.float32_exponents) == counts


def test_autocast_is_compared_with_what_it_casts():
    model = models.MLP
    args = model.init(jnp.float32), model.make_batch(0, 8)
    cast = dpmp.autocast(model.loss)
    with_itself, with_float32 = (
        precision_report(cast, *args, policy="float32", reference=reference).comparison
        for reference in (None, model.loss)
    )
    assert with_itself.loss == with_itself.float32_loss != with_float32.float32_loss
    assert 0.99 < with_float32.total.cosine < 1 - 1e-7


def test_a_gradient_of_zero_is_that_of_float32():
    report = precision_report(lambda w, x: jnp.sum(0 * w), jnp.ones(3), jnp.ones(1))
    assert report.comparison.total.cosine == report.comparison.total.norm_ratio == 1.0
    assert "0.00%" in str(report)


def test_shapes_are_enough_but_for_a_comparison():
    report = precision_report(lambda w, x: jnp.max(x @ w), _W, _X)
    assert report.comparison is report.suggested is None
    assert "Comparison with float32" not in str(report)


def test_a_function_that_is_no_loss_is_looked_at_alone():
    report = precision_report(
        lambda w, x: jax.nn.softmax(x * w),
        jnp.ones(3),
        jnp.ones(3),
        differentiate=False,
    )
    assert report.comparison is None
    assert {x.kind for x in report.findings} == {"exponential", "normalisation"}


def test_the_text_says_what_to_change_and_for_which_data():
    def fun(w, x):
        return jnp.mean(jnp.exp(x * w))  # shown

    text = str(precision_report(fun, jnp.ones(8), jnp.ones((4, 8))))
    line = _line("shown").rpartition(":")[2]
    assert f"test_precision_report.py:{line}  return jnp.mean(jnp.exp(x * w))" in text
    assert "public or synthetic" in " ".join(text.split())
    assert "dpmp.autocast" in text


def test_lines_of_installed_libraries_are_those_that_call_them():
    def fun(w, x):
        return jnp.max(optax.losses.safe_softmax_cross_entropy(x * w, x))  # optax

    found = _found(fun, _W, _X, differentiate=False)
    assert {source for _, source in found} == {_line("optax")}


def test_lines_of_the_caller_are_not_those_of_the_function():
    # Nothing of the caller's is in the program: jax's own function is all there is.
    (finding,) = precision_report(jax.numpy.exp, _X, differentiate=False).findings
    assert __file__ not in finding.source


def test_the_picture_has_histograms_and_ranges(tmp_path):
    pytest.importorskip("matplotlib.figure")
    _, w, constant = _problem()
    report = precision_report(
        lambda w, _: jnp.sum(w.astype(jnp.float32) * constant),
        w,
        jnp.zeros(1),
        policy="mixed_float16",
    )
    path = tmp_path / "gradient.png"
    sizes, ranges = report.plot(path).axes
    assert path.read_bytes().startswith(b"\x89PNG")
    wide, _, shifted = (x.get_data() for x in sizes.patches if hasattr(x, "get_data"))
    assert sum(wide.values) == pytest.approx(100 * 81 / 83)
    np.testing.assert_array_equal(
        np.float64(shifted.edges), np.float64(wide.edges) + 15
    )
    # The first dtype is float16; its range has a normal and a subnormal part.
    float16 = sorted(x.get_x() for x in ranges.patches if round(x.get_y() + 0.4) == 0)
    assert float16 == [-24, -14]
    assert "public data only" in sizes.get_title()


def test_a_missing_matplotlib_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report = precision_report(lambda w, x: jnp.max(w * x), jnp.ones(2), jnp.ones(2))
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'dpmp\[plot\]'"):
        report.plot()


def test_there_is_no_picture_without_data():
    report = precision_report(lambda w, x: jnp.max(x * w), _W, _X)
    with pytest.raises(ValueError, match="nothing to plot without data"):
        report.plot()


def _max(w, x):
    return jnp.max(w * x)


@pytest.mark.parametrize(
    ("fun", "args", "options", "message"),
    [
        ({"w": 1}, (_W,), {}, "fun must be a function"),
        (jnp.max, (), {}, "at least 1 positional arguments"),
        (lambda w, x: x * w, (_W, _W), {}, r"scalar float loss.*differentiate="),
        (lambda w, x: (_max(w, x), w), (_W, _W), {}, "scalar float loss"),
        (_max, (jnp.arange(3), jnp.ones(3)), {}, "leaf of argument 0 must be a real"),
        (_max, (_W, _X), {"policy": "bf16"}, "policy must be one of"),
        (_max, (_W, _X), {"loss_scale": 1000.0}, "loss_scale must be a power of two"),
    ],
    ids=["function", "arguments", "array", "pair", "integers", "policy", "scale"],
)
def test_what_cannot_be_reported_on_is_refused(fun, args, options, message):
    with pytest.raises(ValueError, match=message):
        precision_report(fun, *args, **options)


def scan_from_float32(params, x):
    def body(carry, row):
        return row @ params["w"], None

    return jnp.mean(jax.lax.scan(body, jnp.zeros(4), x)[0])  # the carry clashes


def conv_with_a_constant(params, x):
    kernel = jnp.ones((2, 5, 1, 1)) * 2
    y = jax.lax.conv(x[None, :, :, None], kernel, (1, 1), "SAME")  # float32 clashes
    return jnp.mean(y) * jnp.mean(params["w"])


def sum_of_two_dtypes(params, x):
    return jnp.mean(x @ params["w"] + jnp.zeros(4, jnp.float32))  # strict promotion


@pytest.mark.parametrize(
    ("fun", "message"),
    [
        (scan_from_float32, "float32"),
        (conv_with_a_constant, "same dtypes"),
        (sum_of_two_dtypes, "promotion"),
    ],
)
@pytest.mark.parametrize("differentiate", [True, False])
def test_a_clash_of_dtypes_is_reported_with_its_line(fun, message, differentiate):
    params, x = {"w": jnp.ones((3, 4))}, jnp.ones((5, 3))
    report = precision_report(fun, params, x, differentiate=differentiate)
    (finding,) = report.findings
    assert finding.kind == "clash"
    assert message in finding.primitive
    file, _, line = finding.source.rpartition(":")
    assert "# " in linecache.getline(file, int(line))
    assert file == __file__
    text = str(report)
    assert "dpmp.autocast(fun)" in text
    assert all(len(x) <= 88 for x in text.splitlines() if x.startswith(" " * 7))


def test_an_error_that_float32_has_too_is_raised():
    with pytest.raises(TypeError, match="dot_general"):
        precision_report(lambda w, x: jnp.sum(w @ x), jnp.ones((3, 4)), jnp.ones(5))
