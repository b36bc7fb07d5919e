"""The variables of functions that have failed are gone, for any chain of errors."""

import traceback

import pytest

from dpmp.training._stops import clear_frames


class EqualError(Exception):
    def __eq__(self, other):
        return True

    __hash__ = None


def fail(kind):
    secret = 3
    error = ValueError(f"of {kind}")
    if kind == "own cause":
        raise error from error
    if kind == "equal":
        try:
            fail("first")
        except EqualError:
            raise EqualError from None
    if kind == "first":
        raise EqualError
    if kind == "group":
        try:
            fail("other")
        except ValueError as inner:
            found = inner
        raise ExceptionGroup("two", [found, KeyError()])
    if kind == "context":
        try:
            fail("other")
        except ValueError:
            raise KeyError(secret) from None
    raise error


@pytest.mark.parametrize("kind", ["plain", "own cause", "equal", "group", "context"])
def test_no_error_of_a_chain_has_variables(kind):
    kinds = (ValueError, KeyError, EqualError, ExceptionGroup)
    with pytest.raises(kinds) as caught:
        fail(kind)
    clear_frames(caught.value)
    errors = [caught.value, *getattr(caught.value, "exceptions", ())]
    errors += [caught.value.__context__] if caught.value.__context__ else []
    frames = [x for e in errors for x, _ in traceback.walk_tb(e.__traceback__)]
    of_fail = [x for x in frames if x.f_code.co_name == "fail"]
    assert of_fail
    assert not any(x.f_locals for x in of_fail)
