"""Splits the parameters of a model into those that are trained and the frozen ones."""

from collections.abc import Sequence

import jax

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.lora._paths import path_of, select


def partition(params: PyTree, trainable: str | Sequence[str]) -> tuple[PyTree, PyTree]:
    """Splits a tree of arrays in two, with None in the places of the other arrays.

    >>> params = {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}
    >>> trained, frozen = partition(params, trainable="bias")
    >>> jax.tree.map(jnp.shape, (trained, frozen))
    ({'bias': (2,), 'kernel': None}, {'bias': None, 'kernel': (3, 2)})
    >>> def loss_fn(trained, x):
    ...     params = combine(trained, frozen)
    ...     return jnp.sum(x @ params["kernel"] + params["bias"])

    The state of an optimizer has entries only for the arrays that are trained.

    Args:
      params: the parameters of a model.
      trainable: the arrays to train: a regular expression, of which `re.search` finds a
        part of the name, or a list of names. The name of an array is its path with
        slashes.

    Returns:
      The trainable arrays, and the frozen ones.

    Raises:
      ValueError: if no array is selected, or if there is no array of a given name.
    """
    selected = {*select(params, trainable, trainable=trainable)}

    def part(is_trainable: bool) -> PyTree:
        return jax.tree_util.tree_map_with_path(
            lambda keys, x: x if (path_of(keys) in selected) == is_trainable else None,
            params,
        )

    return part(True), part(False)


def combine(trainable: PyTree, frozen: PyTree) -> PyTree:
    """Puts the two results of `partition` together again.

    Raises:
      ValueError: if an array is in both of them, or if one of them is missing.
    """
    for name, part, other in (
        ("trainable", trainable, frozen),
        ("frozen", frozen, trainable),
    ):
        _validate.require(
            # The parts of a tree that is one array are this array and None.
            part is not None or jax.tree_util.all_leaves([other]),
            "both parts of the parameters must be given",
            missing=name,
            fix="Pass both results of lora.partition.",
        )

    def either(keys: tuple[object, ...], x: object, y: object) -> object:
        _validate.require(
            x is None or y is None,
            "every array must be in one of the two parts of the parameters",
            in_both=path_of(keys),
            fix="Pass both results of lora.partition, of the same parameters.",
        )
        return y if x is None else x

    return jax.tree_util.tree_map_with_path(
        either, trainable, frozen, is_leaf=lambda x: x is None
    )
