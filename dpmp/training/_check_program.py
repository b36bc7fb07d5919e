"""Finds in the program of a loss two mistakes that otherwise no error tells.

A loss may call a model that keeps its own parameters, and not read those that it is
given. Its gradient is zero, and the run learns from noise. Or a loss may draw random
numbers (dropout) from a key that it closes over: they are the same at every step.
"""

import warnings
from typing import Any

from dpmp import _validate
from dpmp.programs import _bodies, _interpreter

_RANDOM = {"random_bits", "rng_bit_generator", "rng_uniform", "threefry2x32"}


def check_program(jaxpr: Any, *, num_params: int, takes_key: bool) -> None:
    """Checks the jaxpr of a loss, whose first arguments are its parameters.

    Raises:
      ValueError: if nothing reads the parameters.

    Warns:
      UserWarning: if the loss draws random numbers without a key of its own.
    """
    params = set(jaxpr.invars[:num_params])
    atoms = [x for eqn in jaxpr.eqns for x in eqn.invars] + [*jaxpr.outvars]
    _validate.require(
        any(x in params for x in atoms if not _interpreter.is_literal(x)),
        "loss_fn must compute with the params that it is given",
        reads_params=False,
        fix="Models of Keras, NNX and Equinox have parameters of their own. Use "
        "model.stateless_call(params, ...), nnx.merge(graphdef, params), or "
        "eqx.combine(params, static). docs/recipes.md has each of them.",
    )
    if not takes_key and _draws(jaxpr):
        warnings.warn(
            "loss_fn draws random numbers from a key that never changes, so that they "
            "are the same for every example at every step. For dropout, pass "
            "uses_prng_key=True, and draw from the key that the loss is then given.",
            stacklevel=2,
        )


def _draws(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name in _RANDOM
        or any(_draws(x.jaxpr) for x in _bodies.sub_programs(eqn))
        for eqn in jaxpr.eqns
    )
