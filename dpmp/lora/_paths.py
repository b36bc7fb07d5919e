"""Names of the arrays of a model, and their selection by these names."""

import re
from collections.abc import Sequence
from typing import Any

import jax

from dpmp import _validate
from dpmp._typing import PyTree


def path_of(keys: Sequence[Any]) -> str:
    """The name of an array: its keys, joined by slashes.

    The array of a variable of Flax NNX has the name of the variable.
    """
    if keys and keys[-1] == jax.tree_util.GetAttrKey("value"):
        keys = keys[:-1]
    return jax.tree_util.keystr(tuple(keys), simple=True, separator="/")


def by_path(tree: PyTree) -> dict[str, Any]:
    """The arrays of a tree by their names; raises ValueError for None."""
    _validate.require(
        tree is not None,
        "params must be a tree of arrays",
        params=None,
        fix="Pass the parameters of the model.",
    )
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_of(keys): leaf for keys, leaf in leaves}


def select(tree: PyTree, selection: str | Sequence[str], **named: Any) -> list[str]:
    """The names of the selected arrays, in the order of the tree.

    Args:
      tree: a tree of arrays.
      selection: a regular expression of which `re.search` finds a part of the name, or
        a list of whole names.
      **named: the argument of the user, for error messages.

    Raises:
      ValueError: if nothing is selected, or if the tree has no array of a given name.
    """
    paths = list(by_path(tree))
    if isinstance(selection, str):
        selected = [path for path in paths if _pattern(selection).search(path)]
    else:
        unknown = sorted({*selection} - {*paths})
        _validate.require(
            not unknown,
            "every selected name must be that of an array",
            unknown=unknown,
            fix=f"The arrays are {_shown(paths)}.",
        )
        selected = [path for path in paths if path in {*selection}]
    _validate.require(
        bool(selected),
        "at least one array must be selected",
        **named,
        fix=f"The arrays are {_shown(paths)}.",
    )
    return selected


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        _validate.fail(
            "a selection must be a valid regular expression",
            selection=text,
            fix=f"It is not: {error}. Or pass a list of names.",
        )


def _shown(paths: Sequence[str], most: int = 20) -> str:
    more = [f"and {len(paths) - most} more"] if len(paths) > most else []
    return ", ".join([*paths[:most], *more])
