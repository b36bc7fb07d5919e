"""A zoo of small models, for tests that compare implementations.

`libraries` has models as people write them in five libraries. Import it where you need
it: it imports these libraries.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from . import _networks, _uses
from ._parts import ZOO, Model

__all__ = [
    "CONV",
    "MLP",
    "STANDARD",
    "TRANSFORMER",
    "ZOO",
    "Model",
    "per_example_losses_and_grads",
]
del _networks, _uses  # they fill the zoo

MLP, CONV, TRANSFORMER = STANDARD = ZOO["mlp"], ZOO["conv"], ZOO["transformer"]


def per_example_losses_and_grads(model: Model, params: Any, batch: Any) -> Any:
    """The losses, (B,), and a tree of gradients, (B, ...), as jax computes them."""
    return _per_example_fn(model)(params, batch)


@functools.cache
def _per_example_fn(model: Model) -> Callable[[Any, Any], Any]:
    def loss(params, example):
        return model.loss(params, jax.tree.map(lambda x: x[None], example))

    return jax.jit(jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0)))
