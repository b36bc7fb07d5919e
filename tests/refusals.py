"""Tables of arguments that are refused, and of what the refusal says."""

from collections.abc import Iterable
from typing import Any

import pytest


def refusals(*rows: tuple[str, Iterable[Any], str]) -> pytest.MarkDecorator:
    """Parametrizes a test of `wrong`, keyword arguments, and a `message` that matches.

    Args:
      *rows: the name of an argument, values that are refused, and the message.
    """
    cases = [
        pytest.param({name: value}, message, id=f"{row}-{name}-{i}")
        for row, (name, values, message) in enumerate(rows)
        for i, value in enumerate(values)
    ]
    return pytest.mark.parametrize(("wrong", "message"), cases)
