"""What the program that computes gradients holds at its worst moment."""

from collections.abc import Callable
from typing import Any

import jax

from dpmp._typing import PyTree
from dpmp.tools.memory import _liveness
from dpmp.tools.memory._program import Body, as_body, size_of

_Lines = list[tuple[str, int, str]]


def tree_bytes(tree: PyTree) -> int:
    """Of all arrays of a tree."""
    return sum(size_of(x) for x in jax.tree.leaves(tree))


def of_gradients(
    loss_fn: Callable[..., jax.Array],
    params: PyTree,
    batch: PyTree,
    *,
    of_examples: bool,
) -> _Lines:
    """The lines of activations and of gradients, of each example or of their mean."""
    grad_fn = jax.value_and_grad(loss_fn)

    def of_one(params: PyTree, example: PyTree) -> Any:
        return grad_fn(params, jax.tree.map(lambda x: x[None], example))

    fun = jax.vmap(of_one, in_axes=(None, 0)) if of_examples else grad_fn
    body = as_body(jax.make_jaxpr(fun)(params, batch), "activations")
    held = "per-example gradients" if of_examples else "gradients"
    _name_outputs(body, held)
    return _lines(_liveness.peak(body))


def of_book_keeping(
    grad_fn: Callable[..., Any], params: PyTree, batch: PyTree
) -> _Lines:
    """The same of a clipped gradient that holds records in place of gradients."""
    body = as_body(jax.make_jaxpr(grad_fn)(params, batch), "activations")
    branches = [node for node in body.nodes if node.name == "cond"]
    if branches:  # the first one computes the records
        for x in branches[0].outputs:
            x.label = "records"
        for branch in branches[0].bodies:
            _name_outputs(branch, "records")
    _name_outputs(body, "part of a sum")
    return _lines(_liveness.peak(body))


def _name_outputs(body: Body, label: str) -> None:
    for x in body.outputs:
        if x is not None:
            x.label = label
    for node in reversed(body.nodes):
        if node.name in ("transpose", "convert_element_type"):
            for x in node.inputs:  # the same, in another order or dtype
                x.label = label if node.outputs[0].label == label else x.label


_FORMULAS = {
    "activations": "what the backward pass reads, and what it is at work on",
    "per-example gradients": "examples at a time x parameters in the compute dtype",
    "gradients": "in the compute dtype",
    "records": "inputs and cotangents of layers, or gradients kept in their place",
    "part of a sum": "of one microbatch, or of the batch",
}


def _lines(found: Any) -> _Lines:
    return [(name, found[name], text) for name, text in _FORMULAS.items()]
