import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpmp import _validate

NOT_NUMBERS = [None, "1", True, math.nan, 1j, [1.0], np.ones(1), jnp.ones(1)]


def test_a_message_says_what_is_required_what_was_given_and_what_to_do():
    with pytest.raises(ValueError, match=r"^x must be y; got x=1, z='a'\. Use y\.$"):
        _validate.fail("x must be y", x=1, z="a", fix="Use y.")


def test_another_error_can_be_asked_for():
    with pytest.raises(KeyError, match="x must be y"):
        _validate.require(False, "x must be y", x=1, fix="", error=KeyError)
    _validate.require(True, "x must be y", x=1, fix="", error=KeyError)


@pytest.mark.parametrize("value", [0, -1.5, math.inf, np.float32(2), np.int64(3)])
def test_python_and_numpy_numbers_are_real(value):
    assert _validate.is_real(value)


@pytest.mark.parametrize("value", [*NOT_NUMBERS, jnp.ones(())])
def test_nothing_else_is_real(value):
    assert not _validate.is_real(value)
    assert not _validate.is_integer(value)


@pytest.mark.parametrize("value", [0, -3, 2**200, np.int8(1), np.uint64(2)])
def test_integers_are_integers(value):
    assert _validate.is_integer(value)


@pytest.mark.parametrize("value", [1.0, np.float64(1), math.inf])
def test_floats_are_no_integers(value):
    assert not _validate.is_integer(value)


@pytest.mark.parametrize("value", [True, False, np.True_, np.False_])
def test_python_and_numpy_bools_are_bools(value):
    checked = _validate.boolean(x=value, fix="")
    assert isinstance(checked, bool)
    assert checked == value


@pytest.mark.parametrize("value", ["yes", "", 0, 1.0, None, jnp.ones((), bool)])
def test_nothing_else_is_a_bool(value):
    with pytest.raises(ValueError, match="x must be True or False; got x="):
        _validate.boolean(x=value, fix="Use True.")


def test_traced_numbers_are_not_real():
    seen = []
    jax.jit(lambda x: seen.append(_validate.is_real(x)))(1.0)
    assert seen == [False]


@pytest.mark.parametrize(
    ("check", "good", "bad", "message"),
    [
        (
            _validate.positive_integer,
            [1, np.int64(5), jnp.int32(5)],
            [0, -1, 1.0],
            "n must be an integer of at least 1",
        ),
        (
            _validate.positive,
            [1, 1e-300, np.float32(2), jnp.ones(())],
            [0, -1.0, math.inf],
            "n must be a finite number above 0",
        ),
        (
            _validate.nonnegative,
            [0, 0.0, 1e300],
            [-1e-300, math.inf, -math.inf],
            "n must be a finite number of at least 0",
        ),
        (
            _validate.probability,
            [1, 1.0, 5e-324],
            [0, 1 + 1e-15, -0.5, math.inf],
            r"n must be in \(0, 1\]",
        ),
    ],
)
def test_ranges_include_and_exclude_their_ends(check, good, bad, message):
    for value in good:
        check(n=value, fix="")
    for value in [*bad, *NOT_NUMBERS]:
        with pytest.raises(ValueError, match=message):
            check(n=value, fix="")


def test_float64_is_refused_where_jax_would_narrow_it():
    with pytest.raises(ValueError, match=r"sums need 64-bit mode.*jax_enable_x64"):
        _validate.check_x64(jnp.float64, "sums")
    _validate.check_x64(jnp.float32, "sums")
    with jax.enable_x64(True):
        _validate.check_x64(jnp.float64, "sums")
