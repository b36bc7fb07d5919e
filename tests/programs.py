"""What is in a program, for tests that look into it, and how others are compiled."""

from collections.abc import Iterator
from typing import Any

import jax

# Options of `jax.jit` for statistics of noise, which no optimization can change. They
# are for no test of bits or of compiled programs. A draw compiles five times as fast.
UNOPTIMIZED = {"xla_backend_optimization_level": 0}


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr, and of those within them."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(equation.params, is_leaf=_holds_equations):
            if _holds_equations(value):
                yield from equations(getattr(value, "jaxpr", value))


def _holds_equations(x: Any) -> bool:
    return hasattr(getattr(x, "jaxpr", x), "eqns")
