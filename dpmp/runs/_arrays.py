"""The arrays of a checkpoint, which orbax writes and reads."""

import contextlib
import logging
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import _validate
from dpmp._typing import PyTree

_NAME = "arrays"


def write(folder: pathlib.Path, state: PyTree) -> None:
    """Writes the arrays of a state; each process writes its part."""
    arrays = {name: _words(x) for name, x in _by_name(state).items() if np.size(x)}
    try:
        with _for_orbax(folder) as path, _checkpointer() as (orbax, args):
            orbax.save(path / _NAME, args=args.StandardSave(arrays))
    except Exception as error:  # a page of text, whose end says why
        reason = f"{type(error).__name__} of orbax: ...{str(error)[-160:]}"
    else:
        return
    raise OSError(None, reason, str(folder))


def types_of(state: PyTree) -> dict[str, str]:
    """The names of all arrays with their dtypes and shapes."""
    return {
        name: f"{x.dtype if _is_key(x) else x.dtype.name}{list(np.shape(x))}"
        for name, x in _by_name(state).items()
    }


def check_same_types(required: str, **types: dict[str, str]) -> None:
    """Raises ValueError unless two results of `types_of`, each with a name, agree."""
    one, other = types.values()
    for name in other | one:
        found: dict[str, Any] = {of: each.get(name) for of, each in types.items()}
        if one.get(name) != other.get(name):
            _validate.fail(required, array=name, **found)


def read(folder: pathlib.Path, like: PyTree, saved: dict[str, str]) -> PyTree:
    """Reads arrays like those of a state; `saved` has the types that were written."""
    check_same_types(
        "the state must have the arrays of the checkpoint. Build the model and the "
        "trainer as they were, or use another directory, which is charged as well.",
        saved=saved,
        wanted=types_of(like),
    )
    arrays = _by_name(like)
    shapes = {name: _shape_of(x) for name, x in arrays.items() if np.size(x)}
    with _for_orbax(folder) as path, _checkpointer() as (orbax, args):
        found = orbax.restore(path / _NAME, args=args.StandardRestore(shapes))
    leaves = [_as_was(x, found.get(name, x)) for name, x in arrays.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


@contextlib.contextmanager
def _checkpointer() -> Iterator[tuple[Any, Any]]:
    # orbax takes half a second to import, and is needed here alone.
    import orbax.checkpoint as ocp

    # If the disk is full, its threads log a hundred lines besides the exception.
    log = logging.getLogger("absl")
    log.addFilter(_is_not_of_orbax)
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            yield checkpointer, ocp.args
    finally:
        log.removeFilter(_is_not_of_orbax)


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


@contextlib.contextmanager
def _for_orbax(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A link to the path, of which orbax would read a * or a backslash otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        link = pathlib.Path(folder, "checkpoint")
        link.symlink_to(path)
        yield link


def _by_name(tree: PyTree) -> dict[str, Any]:
    # A user may have put a Python number there, as a learning rate.
    arrays = jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), tree)
    paths = jax.tree_util.tree_leaves_with_path(arrays)
    return {jax.tree_util.keystr(path): x for path, x in paths}


def _is_key(x: Any) -> bool:  # an optimizer may have one, for public random numbers
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _words(x: Any) -> Any:
    return jax.random.key_data(x) if _is_key(x) else x


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
    x = _words(x)
    # A checkpoint names the devices that it was written from; these may be gone.
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jnp.asarray(x).sharding)


def _as_was(like: Any, restored: Any) -> jax.Array:
    """Makes a restored array a key or an uncommitted array, if `like` is one."""
    if _is_key(like):
        impl = jax.random.key_impl(like)
        restored = jax.random.wrap_key_data(_as_was(_words(like), restored), impl=impl)
    is_committed = isinstance(like, jax.Array) and like.committed
    return restored if is_committed or _is_key(like) else jnp.array(np.array(restored))
