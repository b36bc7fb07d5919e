"""Names of the arrays of a model, and functions that select arrays by name."""

import collections
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.lora._quantised import is_quantised


def path_of(keys: Sequence[Any]) -> str:
    """The name of an array: its keys, joined by slashes.

    The array of a variable of Flax NNX has the name of the variable.
    """
    if keys and keys[-1] == jax.tree_util.GetAttrKey("value"):
        keys = keys[:-1]
    return jax.tree_util.keystr(tuple(keys), simple=True, separator="/")


def by_path(
    tree: PyTree, is_leaf: Callable[[Any], bool] | None = is_quantised
) -> dict[str, Any]:
    """The arrays of a tree by their names; raises ValueError if two have the same one.

    A quantised array counts as one, unless `is_leaf` says otherwise.
    """
    if tree is None:
        _validate.fail(
            "params must be a tree of arrays. Pass the parameters of the model.",
            params=None,
        )
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf)
    arrays = {path_of(keys): leaf for keys, leaf in leaves}
    if len(arrays) < len(leaves):
        counts = collections.Counter(path_of(keys) for keys, _ in leaves)
        _validate.fail(
            'every array must have a name of its own. The keys "a/b" and "a", "b" are '
            "the same name: rename one of them.",
            same_names=[name for name, number in counts.items() if number > 1],
        )
    return arrays


def map_by_path(fn: Callable[[str, Any], Any], tree: PyTree) -> PyTree:
    """The tree of `fn(name, array)`."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, x: fn(path_of(keys), x), tree, is_leaf=is_quantised
    )


def select(tree: PyTree, **selection: Any) -> list[str]:
    """The names that the one keyword selects, in the order of the tree.

    It is a regular expression that matches a part of a name, or a list of names.
    """
    ((_, given),) = selection.items()
    paths = list(by_path(tree))
    names = ", ".join(paths[:20])
    more = f", and {len(paths) - 20} more" if len(paths) > 20 else ""
    fix = f"The arrays are {names}{more}."
    if not paths:
        fix = "The tree has no arrays: are two arguments in the wrong order?"
    if isinstance(given, str):
        pattern = _pattern(given)
        selected = [path for path in paths if pattern.search(path)]
    else:
        if not isinstance(given, Collection) or not all(
            isinstance(x, str) for x in given
        ):
            _validate.fail(
                "a selection must be a regular expression, as a text, or a list of "
                "names",
                fix=fix,
                **selection,
            )
        unknown = sorted({*given} - {*paths})
        if unknown:
            _validate.fail(
                "every selected name must be that of an array", unknown=unknown, fix=fix
            )
        selected = [path for path in paths if path in {*given}]
    if not selected:
        _validate.fail("at least one array must be selected", fix=fix, **selection)
    return selected


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        _validate.fail(
            "a selection must be a valid regular expression",
            selection=text,
            fix=f"It is not: {error}.",
        )


def partition(params: PyTree, trainable: str | Sequence[str]) -> tuple[PyTree, PyTree]:
    """Splits a tree of arrays in two trees; None stands for arrays of the other tree.

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
      trainable: the arrays to train, by their names, as the `targets` of `init`.

    Returns:
      The trainable arrays, and the frozen ones.

    Raises:
      ValueError: if no array is selected, or if there is no array of a given name.
    """
    selected = select(params, trainable=trainable)

    def part(is_trainable: bool) -> PyTree:
        return map_by_path(
            lambda path, x: x if (path in selected) == is_trainable else None, params
        )

    return part(True), part(False)


def combine(trainable: PyTree, frozen: PyTree) -> PyTree:
    """Merges the two results of `partition` into one tree.

    Raises:
      ValueError: if an array is in both of them, or if one of them is missing.
    """
    fix = "Pass both results of lora.partition."
    parts = {"trainable": trainable, "frozen": frozen}
    missing = [name for name, part in parts.items() if part is None]
    # The parts of a tree that is one array are this array and None.
    if missing and not jax.tree_util.all_leaves(
        [frozen if trainable is None else trainable]
    ):
        _validate.fail(
            "both parts of the parameters must be given", fix=fix, missing=missing
        )

    def either(keys: tuple[object, ...], x: object, y: object) -> object:
        if x is not None and y is not None:
            _validate.fail(
                "every array must be in one of the two parts of the parameters",
                fix=fix,
                in_both=path_of(keys),
            )
        return y if x is None else x

    return jax.tree_util.tree_map_with_path(
        either, trainable, frozen, is_leaf=lambda x: x is None
    )
