"""Chooses how many examples to process at a time, from shapes and the device alone."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from dpmp import _meshes
from dpmp.engines._signature import Signature
from dpmp.programs import analysis, interpreter

# On CPUs, steps of small models (benchmarks/choice.py) are fastest if the largest array
# of a microbatch has about this many entries, and its materialized gradients that many.
_ENTRIES_OF_ARRAY, _ENTRIES_OF_GRADIENTS = 2**18, 2**21

# A microbatch reads all parameters. If they are large, as in a language model, fewer
# examples take longer.
_FEWEST = 4

# On other devices, the arrays of a microbatch may take this share of the memory, as if
# all of them were float32 and in memory together.
_SHARE_OF_MEMORY = 0.25


def fitting_microbatch(
    fun: Callable[..., Any],
    signature: Signature,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    holds_gradients: bool,
) -> int:
    """Returns the number of examples whose arrays fit into a cache or the memory.

    `holds_gradients` tells whether the per-example gradients are such arrays. The loss
    `fun` is traced for one example, and nothing is computed.
    """
    of_one_example, params, example = signature.for_one_example(fun, args, kwargs)
    closed = jax.make_jaxpr(of_one_example)(params, example)
    num_params = len(jax.tree.leaves(params))
    sizes = [*_sizes(closed.jaxpr, {*closed.jaxpr.invars[num_params:]}), 1]
    gradient = sum(x.size for x in jax.tree.leaves(params)) if holds_gradients else 0
    if jax.local_devices()[0].platform == "cpu":
        fitting = max(_FEWEST, _ENTRIES_OF_ARRAY // max(sizes))
        fitting = min(fitting, _ENTRIES_OF_GRADIENTS // max(gradient, 1))
    else:
        memory = int(_SHARE_OF_MEMORY * _meshes.memory_of_device())
        fitting = memory // (4 * (sum(sizes) + gradient))
    return max(1, fitting)


def _sizes(jaxpr: Any, of_example: set[Any]) -> Iterator[int]:
    """Yields the sizes of all arrays that depend on the variables `of_example`."""
    for eqn, read in zip(
        jaxpr.eqns, interpreter.variables_read(jaxpr)[:-1], strict=True
    ):
        if of_example.isdisjoint(read):
            continue
        of_example.update(eqn.outvars)
        yield from (math.prod(getattr(x.aval, "shape", ())) for x in eqn.outvars)
        known = set(read) - of_example
        for sub in analysis.sub_programs(eqn):
            carry = range(sub.num_consts, sub.num_consts + sub.num_carry)
            inside = {
                x
                for i, x in enumerate(sub.jaxpr.invars)
                if i in carry or not any(x is sub.invars[i] for x in known)
            }
            yield from _sizes(sub.jaxpr, inside)
