import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpmp import GridArray, _validate

NOT_NUMBERS = [None, "1", True, math.nan, 1j, [1.0], np.ones(1), jnp.ones(1)]


def test_a_message_says_what_is_required_what_was_given_and_what_to_do():
    with pytest.raises(ValueError, match=r"^x must be y; got x=1, z='a'\. Use y\.$"):
        _validate.fail("x must be y", x=1, z="a", fix="Use y.")
    with pytest.raises(KeyError, match="x must be y"):
        _validate.fail("x must be y", x=1, fix="", error=KeyError)


@pytest.mark.parametrize(
    ("values", "is_real", "is_integer"),
    [
        ([0, -3, 2**200, np.int8(1), np.int64(3), np.uint64(2)], True, True),
        ([1.0, -1.5, np.float32(2), np.float64(1), math.inf], True, False),
        ([*NOT_NUMBERS, jnp.ones(())], False, False),
    ],
)
def test_python_and_numpy_numbers_alone_are_real(values, is_real, is_integer):
    assert {_validate.is_real(x) for x in values} == {is_real}
    assert {_validate.is_integer(x) for x in values} == {is_integer}


def test_traced_numbers_are_not_real():
    seen = []
    jax.jit(lambda x: seen.append(_validate.is_real(x)))(1.0)
    assert seen == [False]


def test_python_and_numpy_bools_alone_are_bools():
    for value in (True, False, np.True_, np.False_):
        checked = _validate.boolean(x=value, fix="")
        assert isinstance(checked, bool)
        assert checked == value
    for value in ("yes", "", 0, 1.0, None, jnp.ones((), bool)):
        with pytest.raises(ValueError, match="x must be True or False; got x="):
            _validate.boolean(x=value, fix="Use True.")


@pytest.mark.parametrize(
    ("check", "good", "bad", "message"),
    [
        (
            "positive_integer",
            [1, np.int64(5), jnp.int32(5)],
            [0, -1, 1.0],
            "an integer of at least 1",
        ),
        ("nonnegative_integer", [0, np.int8(5)], [-1, 0.0], "an integer of at least 0"),
        ("real", [-math.inf, 0, np.float16(2)], [], "a number"),
        ("positive", [1, 1e-300, jnp.ones(())], [0, -1.0, math.inf], "a finite number"),
        ("nonnegative", [0, 0.0, 1e300], [-1e-300, math.inf], "a finite number"),
        ("probability", [1, 1.0, 5e-324], [0, 1 + 1e-15, math.inf], r"in \(0, 1\]"),
        ("fraction", [0.5, 5e-324], [0, 1, math.inf], r"in \(0, 1\)"),
    ],
)
def test_ranges_include_and_exclude_their_ends(check, good, bad, message):
    check = getattr(_validate, check)
    for value in good:
        assert check(n=value, fix="") == value
    for value in [*bad, *NOT_NUMBERS]:
        with pytest.raises(ValueError, match=f"n must be {message}"):
            check(n=value, fix="")


def test_an_integer_of_a_range():
    assert _validate.integer_in(range(2**63), "n must. Use 0.", n=np.int8(3)) == 3
    for value in (-1, 4, 1.0, *NOT_NUMBERS):
        with pytest.raises(ValueError, match=r"n must be small; got n=.*\. Use 0\."):
            _validate.integer_in(range(4), "n must be small. Use 0.", n=value)


def test_float64_is_refused_where_jax_would_narrow_it():
    with pytest.raises(ValueError, match=r"sums need 64-bit mode.*jax_enable_x64"):
        _validate.check_x64(jnp.float64, "sums")
    _validate.check_x64(jnp.float32, "sums")
    with jax.enable_x64(True):
        _validate.check_x64(jnp.float64, "sums")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (np.full(3, 0.731), r"a numpy.ndarray of shape \(3,\), float64"),
        ({"x": np.full(3, 0.731)}, "a builtins.dict of arrays"),
        (GridArray(jnp.full(3, 731), 1.0), "a dpmp.numerics._grid.GridArray of arrays"),
        ([731] * 200, "a builtins.list that is too long to show"),
        ("731" * 200, "a builtins.str that is too long to show"),
        ({1: 731, "x": 731}, "given=a builtins.dict"),  # jax cannot sort its keys
    ],
)
def test_a_message_shows_no_array_and_nothing_long(value, shown):
    with pytest.raises(ValueError, match=shown) as caught:
        _validate.fail("this must be a number. Pass one.", given=value)
    assert len(str(caught.value)) < 500
    assert "731" not in str(caught.value)


def test_a_sum_does_not_show_its_counts():
    assert repr(GridArray(jnp.full(3, 731), 1.0)) == "GridArray(int32[3], unit=1.0)"
