"""What is said of programs that are known to be bad, and of one that is not."""

import inspect
import linecache
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


_with_rule = jax.custom_vjp(_narrow_sum)
_with_rule.defvjp(lambda x: (_narrow_sum(x), x), lambda x, ct: (ct * x,))


def _in_scan(w, x):
    return jnp.max(jax.lax.scan(lambda c, _: (c, _narrow_sum(x * w)), 0, length=2)[1])


def _in_while(w, x):
    def body(state):
        return state[0] + 1, _narrow_sum(x * w)

    return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, w[0]))[1]


_PROGRAMS = {
    "jit": lambda w, x: jax.jit(_narrow_sum)(x * w),
    "scan": _in_scan,
    "remat": lambda w, x: jax.checkpoint(lambda x: _narrow_sum(x * w))(x),
    "while": _in_while,
    "cond": lambda w, x: jax.lax.cond(w[0] > 0, lambda: _narrow_sum(x), lambda: w[0]),
    "custom_vjp": lambda w, x: _with_rule(x * w),
}


@pytest.mark.parametrize("fun", _PROGRAMS.values(), ids=_PROGRAMS)
def test_a_narrow_sum_is_found_at_its_line_wherever_it_is(fun):
    found = _found(fun, _W, _X, policy="mixed_float16", differentiate=False)
    finding = found["sum", _line("narrow sum")]
    assert (finding.primitive, finding.dtype) == ("reduce_sum", "float16")
    assert (finding.count, finding.length) == (1, 64 * 128)
    assert finding.bound == 64 * 128 * 2**-11
    assert not _kinds(fun, _W, _X, policy="float32", differentiate=fun != _in_while)


def _variance(w, x):
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    return jnp.max(centred * jax.lax.rsqrt(variance + 1e-6) * w)  # variance


def _accumulate(w, x, dtype=None):
    dtype = dtype or w.dtype

    def step(carry, row):
        return (carry + (row * w).astype(dtype)).astype(dtype), None  # carry

    return jnp.max(jax.lax.scan(step, jnp.zeros(128, dtype), x)[0])


def _widened_in_a_loop(w, x):
    def step(carry, row):
        wide = carry.astype(jnp.float32) + row.astype(jnp.float32)  # widened
        return wide.astype(carry.dtype), None

    return jnp.max(jax.lax.scan(step, w, x)[0])


def _endless(w, x):
    def body(total):
        return total + w  # endless

    return jnp.max(jax.lax.while_loop(lambda t: t[0] < 9, body, w * 2))


def _recurrent(w, x):
    def step(carry, row):
        return jnp.tanh(carry * w + row), None  # recurrent

    return jnp.max(jax.lax.scan(step, jnp.zeros(128, w.dtype), x)[0])


def _back_and_forth(w, x):
    wide = jnp.tanh(x.astype(jnp.float32))
    narrow = wide.astype(x.dtype)  # astype
    return jnp.sum(narrow.reshape(-1).astype(jnp.float32))


def _widened_parameter(params, x):
    scale = params["scale"].astype(jnp.float32)  # scale
    return jnp.max(jnp.tanh(x * params["w"]).astype(jnp.float32) * scale)


def _widened_input(w, batch):
    y = batch["y"].astype(jnp.float32)  # argument 1['y']
    return jnp.max(y * jnp.max(w).astype(jnp.float32))


_PARAMS = {"scale": _W, "w": _W}
_WIDENED = ("astype", "dot_general", "scale", "argument 1['y']")
_ARGS = {"scale": (_PARAMS, _X), "argument 1['y']": (_W, {"y": _X})}
_BAD = {
    "narrow sum": lambda w, x: _narrow_sum(x * w) + _narrow_sum(x),
    "softmax": lambda w, x: jnp.max(jax.nn.softmax(x * w)),  # softmax
    "variance": _variance,
    "carry": _accumulate,
    "widened": _widened_in_a_loop,
    "endless": _endless,
    "chain": lambda w, x: jnp.max(sum((x[i] for i in range(64)), w)),  # chain
    "recurrent": _recurrent,
    "embedding": lambda w, x: jnp.max(w[x.astype(jnp.int32)]),  # embedding
    "bias": lambda w, x: jnp.max(x + w),  # bias
    "astype": _back_and_forth,
    "dot_general": lambda w, x: (x @ x.T).astype(jnp.float32),  # dot_general
    "scale": _widened_parameter,
    "argument 1['y']": _widened_input,
    # Lines of installed libraries are those that call them.
    "optax": lambda w, x: jnp.max(optax.safe_softmax_cross_entropy(x * w, x)),  # optax
}
_IN_GRADIENT = {"in_gradient": True}
_SCAN_CARRY = {"primitive": "scan carry", "length": 64, "bound": 64 * 2**-8}


@pytest.mark.parametrize(
    ("line", "kind", "expected"),
    [
        ("narrow sum", "sum", {"count": 2}),
        ("softmax", "exponential", {"dtype": "bfloat16"}),
        ("softmax", "normalisation", {"dtype": "bfloat16"}),
        ("variance", "normalisation", {"dtype": "bfloat16"}),
        ("carry", "running sum", _SCAN_CARRY),
        ("widened", "running sum", {}),
        ("endless", "running sum", {"length": None, "bound": None}),
        ("chain", "running sum", {"length": 65}),
        ("recurrent", "running sum", _IN_GRADIENT),
        ("embedding", "running sum", {"length": 64 * 128, **_IN_GRADIENT}),
        ("bias", "gradient sum", {"length": 64, **_IN_GRADIENT}),
        ("optax", "exponential", {}),
        *[(x, "widened", {"primitive": x}) for x in _WIDENED],
    ],
)
def test_a_bad_line_is_found(line, kind, expected):
    is_in_gradient = expected.get("in_gradient", False)
    args = _ARGS.get(line, (_W, _X))
    found = _found(_BAD[line], *args, differentiate=is_in_gradient)
    finding = found[kind, _line(line)]
    assert {name: getattr(finding, name) for name in expected} == expected
    if line == "scale":  # is not widened if it stays in float32
        policy = Policy.from_name("mixed_bfloat16", float32_paths=("scale",))
        assert not _kinds(_BAD[line], *args, policy=policy, differentiate=False)


def _nested_loops(w, x):
    """The inner loop adds the outer carry, but not its own."""

    def outer(carry, row):
        def inner(state, entry):
            return jnp.tanh(state) + carry, entry * state

        state, ys = jax.lax.scan(inner, row, x)
        return jnp.tanh(state) + jnp.tanh(jnp.max(ys, 0)), None

    return jnp.max(jax.lax.scan(outer, w, x)[0])


@pytest.mark.parametrize(
    ("fun", "differentiate"),
    [
        (lambda w, x: _narrow_sum(x[:3, :5]) * jnp.max(w), True),
        (lambda w, x: jnp.max(x / w), False),
        (lambda w, x: jnp.max(x) * jnp.max(w), True),
        (lambda w, x: _accumulate(w, x, jnp.float32), False),
        (lambda w, x: (jnp.max(w), jnp.exp(x))[0], True),  # is not used
        # The body replaces the carry.
        (lambda w, x: jax.lax.scan(lambda c, y: (jnp.tanh(c) * y, 0), w, x)[0], False),
        (_nested_loops, False),
        # The rounded values are used, or the product is not rounded.
        (lambda w, x: (jnp.tanh(x) * w).astype(jnp.float32), False),
        (lambda w, x: jnp.matmul(x, x.T, preferred_element_type=jnp.float32), False),
    ],
)
def test_harmless_programs_raise_no_alarm(fun, differentiate):
    assert not _kinds(fun, _W, _X, differentiate=differentiate)


def test_a_transformer_with_float32_softmax_and_norms_raises_no_alarm():
    model = models.TRANSFORMER
    params = jax.eval_shape(lambda: model.init(jnp.float32))
    tokens = jax.ShapeDtypeStruct((3, 6), jnp.int32)
    assert not _kinds(model.loss, params, tokens) & _ALARMS


def test_shares_are_those_of_numpy():
    # The gradient is a constant, since the policy rounds inputs.
    grad, scale = np.float32([*2.0 ** -np.linspace(20, 60, 81), 0, 0]), 2.0**15

    def loss(w):
        return jnp.sum(w.astype(jnp.float32) * grad)

    options = {"policy": "mixed_float16", "loss_scale": scale}
    report = precision_report(loss, jnp.ones(83), **options)
    rounded = (grad[:-2] * scale).astype(np.float16)
    total = report.comparison.total
    assert total.num_entries == 83
    assert total.zero == np.mean(rounded == 0)
    tiny = np.finfo(np.float16).smallest_normal
    assert total.subnormal == np.mean((rounded != 0) & (rounded < tiny))
    assert total.overflow == 0
    assert f"Underflow: {total.lost:.2%}" in str(report)


@pytest.mark.parametrize(("factor", "is_zero"), [(3e5, False), (0.0, True)])
def test_a_gradient_may_overflow_or_be_zero(factor, is_zero):
    def loss(w, x):
        return factor * jnp.mean((w * x).astype(jnp.float32))

    args = np.ones((2, 2), np.float32)
    total = precision_report(loss, *args, policy="mixed_float16").comparison.total
    assert total.not_finite == total.overflow == (not is_zero)
    if is_zero:
        assert total.cosine == total.norm_ratio == 1.0


_MODEL = models.MLP


def _compare(fun, **options):
    args = _MODEL.init(jnp.float32), _MODEL.make_batch(0, 8)
    return precision_report(fun, *args, **options).comparison


def _flat(tree):
    return np.concatenate([np.float64(x).ravel() for x in jax.tree.leaves(tree)])


def test_bfloat16_is_compared():
    policy, comparison = Policy.from_name("mixed_bfloat16"), _compare(_MODEL.loss)
    params, batch = _MODEL.init(jnp.float32), _MODEL.make_batch(0, 8)
    grad = jax.jit(jax.grad(_MODEL.loss))
    a = _flat(grad(policy.cast_to_compute(params), policy.cast_inputs(batch)))
    b = _flat(grad(params, batch))
    total = comparison.total
    cosine = a @ b / np.sqrt((a @ a) * (b @ b))
    assert total.cosine == pytest.approx(cosine, abs=1e-5)
    assert total.norm_ratio == pytest.approx(np.sqrt(a @ a / (b @ b)), abs=1e-3)
    cosines = [x.cosine for x in comparison.parameters]
    assert cosines == sorted(cosines)
    paths = {x.path for x in comparison.parameters}
    assert paths == {"hidden/w", "hidden/b", "out/w", "out/b"}


def test_autocast_is_compared_with_what_it_casts():
    cast = dpmp.autocast(_MODEL.loss)
    with_itself, with_float32 = (
        _compare(cast, policy="float32", reference=reference)
        for reference in (cast, None)
    )
    assert with_itself.loss == with_itself.float32_loss != with_float32.float32_loss
    assert with_itself.relative_difference == 0
    for x in (with_itself.total, *with_itself.parameters):
        assert x.cosine == pytest.approx(1.0, abs=1e-12)
        assert x.norm_ratio == 1.0
    assert 0.99 < with_float32.total.cosine < 1 - 1e-7


def test_a_function_that_is_no_loss_is_looked_at_alone():
    kinds = _kinds(lambda w, x: jax.nn.softmax(x * w), _W, _X, differentiate=False)
    assert kinds == {"exponential", "normalisation"}


def _max(w, x):
    return jnp.max(w * x)


@pytest.mark.parametrize(
    ("fun", "w", "message"),
    [
        (lambda w, x: x * w, jnp.ones(3), r"scalar float loss.*differentiate="),
        (_max, jnp.arange(3), "leaf of argument 0 must be a real"),
        # In float32 too.
        (lambda w, x: jnp.sum(w @ x), jnp.ones((3, 4)), "dot_general"),
    ],
)
def test_what_has_no_gradient_is_refused(fun, w, message):
    with pytest.raises((ValueError, TypeError), match=message):
        precision_report(fun, w, jnp.ones(3))


def scan_from_float32(params, x):
    def body(carry, row):
        return row @ params["w"], None

    return jnp.mean(jax.lax.scan(body, jnp.zeros(4), x)[0])  # the carry clashes


def sum_of_two_dtypes(params, x):
    return jnp.mean(x @ params["w"] + jnp.zeros(4, jnp.float32))  # strict promotion


@pytest.mark.parametrize(
    ("fun", "message", "differentiate"),
    [(scan_from_float32, "float32", True), (sum_of_two_dtypes, "promotion", False)],
)
def test_a_clash_of_dtypes_is_reported_with_its_line(fun, message, differentiate):
    args = {"w": np.ones((3, 4), np.float32)}, np.ones((5, 3), np.float32)
    report = precision_report(fun, *args, differentiate=differentiate)
    (finding,) = report.findings
    assert finding.kind == "clash"
    assert message in finding.primitive
    file, _, line = finding.source.rpartition(":")
    assert file == __file__
    assert "# " in linecache.getline(file, int(line))
    assert "dpmp.autocast(fun)" in str(report)


def test_a_policy_whose_layers_take_turns_has_a_report():
    options = {"products": "int8_forward", "rounded_share": 0.5}
    policy = Policy(jnp.float32, jnp.bfloat16, **options)
    assert "gradient sum" in _kinds(_in_scan, _W, _X, policy=policy)
