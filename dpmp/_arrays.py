"""Turns sensitive values into arrays. No error, warning or flag shows their content."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import _validate
from dpmp._typing import PyTree


@contextlib.contextmanager
def without_debugging() -> Iterator[None]:
    """Turns off jax's flags for debugging, which look at sensitive arrays, too."""
    # Their exceptions would show that an example, or its gradient, is not finite. And
    # without jit, each operation would be visible.
    with jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False):
        yield


def check_keys(what: str, tree: PyTree) -> None:
    """Raises ValueError, for the tree `what`, if jax cannot sort the keys of a dict."""
    with contextlib.suppress(ValueError):
        jax.tree.structure(tree)
        return
    _validate.fail(
        f"the keys of every dict in {what} must be of one type. Use texts; for a table "
        "of pandas, table.columns = table.columns.astype(str).",
        type=type(tree).__name__,
    )


def is_narrow(x: Any) -> bool:
    """Whether elements have fewer than 8 bits: on CPUs, programs refuse such arrays."""
    is_number = not jnp.issubdtype(x.dtype, jax.dtypes.extended)  # as keys are
    return is_number and jax.dtypes.itemsize_bits(x.dtype) < 8


def as_device_dtypes(tree: PyTree) -> PyTree:
    """Turns the leaves into NumPy arrays of dtypes that jax has.

    Arrays of jax, shapes and numbers of Python stay. A value that overflows causes no
    warning. Raises ValueError, with the path of the leaf, for a dtype that jax does not
    have: its own error would show the values.
    """
    return jax.tree_util.tree_map_with_path(_in_device_dtype, tree)


def as_mask(**named: Any) -> Any:
    """Turns a mask, passed by its name, into an array. None stays."""
    ((name, mask),) = named.items()
    path = (jax.tree_util.DictKey(name),)
    return None if mask is None else _in_device_dtype(path, mask)


def _in_device_dtype(path: Any, x: Any) -> Any:
    is_of_jax = isinstance(x, jax.Array | jax.ShapeDtypeStruct)
    # jax gives such a number the dtype of what it meets; a larger one it would show.
    is_number = type(x) in (bool, int, float) and not abs(x) >= 2**31
    if is_of_jax or is_number or hasattr(x, "__jax_array__"):
        return x
    array = as_array(path, x)
    with np.errstate(all="ignore"):
        return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def as_array(path: Any, x: Any) -> np.ndarray:
    """Turns a leaf into a NumPy array; jax's error for its dtype would show values."""
    array = np.empty(0, object)
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.extended):
        x = None  # NumPy cannot have keys
    # NumPy's message about lists of different lengths would show a shape.
    with contextlib.suppress(*([ValueError] if isinstance(x, list) else [])):
        array = np.asarray(x)
    if _is_of_jax(array.dtype) and not isinstance(x, np.ma.MaskedArray):
        return array
    column = jax.tree_util.keystr(path) or "(the only one)"
    if array.dtype.kind in "iufc" and not array.dtype.isnative:
        _validate.fail(
            "examples must have the byte order of this machine. Use "
            'x.astype(x.dtype.newbyteorder("=")).',
            column=column,
        )
    _validate.fail(
        "examples must be numbers of a dtype that jax has, in arrays without masks. "
        "Turn text and categories into numbers (docs/data.md shows how) or leave them "
        "out, pad lists of different lengths to one length, replace None, make sparse "
        "matrices dense, and pass masks beside x.filled(0).",
        column=column,
        type=type(x).__name__,
        content=name_of(array.dtype),
    )


def name_of(dtype: np.dtype) -> str:
    """The kind of a dtype, which itself would show the length of the longest text."""
    return dtype.type.__name__


@functools.cache
def _is_of_jax(dtype: np.dtype) -> bool:
    try:
        jax.device_put(np.zeros(0, jax.dtypes.canonicalize_dtype(dtype)))
    except Exception:  # for texts, objects, dates and long floats
        return False
    return True
