"""What files call the parameters, and how they lay them out.

A table maps the path of a parameter here to the name of an array in a file. A name with
`{}` stands for one array in each layer; here these are stacked. Several paths with one
name are parts of one array, side by side along the outputs.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from flax import traverse_util

Arrays = Mapping[str, np.ndarray]  # by name; a file reads an array when it is asked to


@dataclasses.dataclass(frozen=True)
class Names:
    """The names of one kind of file.

    Attributes:
      table: from paths to names.
      outputs_first: whether the file has the outputs of a kernel on its first axis.
      ignored: ends of names of arrays that are no parameters.
    """

    table: Mapping[str, str]
    outputs_first: bool
    ignored: tuple[str, ...] = ()

    def parts(self, path: str) -> list[str]:
        """The paths that share their array with `path`, in order."""
        return [other for other, name in self.table.items() if name == self.table[path]]

    def to_file(self, path: str, array: np.ndarray) -> np.ndarray:
        """The layout in the file; its own inverse."""
        is_turned = self.outputs_first and path.endswith("kernel")
        return array.T if is_turned else array


def flat(tree: Any) -> dict[str, Any]:
    """A nested dict as one of paths like "layers/attention/query/kernel"."""
    return traverse_util.flatten_dict(tree, sep="/")


def read_params(
    shapes: Any,
    names: Names,
    arrays: Arrays,
    convert: Callable[[str, np.ndarray], Any] = lambda path, x: x,
) -> dict[str, Any]:
    """Reads parameters of given shapes; every array of the file must find its place.

    `convert` is called with the path of each and its array.
    """
    wanted = flat(shapes)
    found = _Found(arrays)
    params = {
        path: convert(path, _read(path, x.shape, names, found))
        for path, x in wanted.items()
    }
    left = sorted(found.names - found.used)
    left = [name for name in left if not name.endswith(names.ignored)]
    if left:
        raise ValueError(
            "The model must have a place for all weights; got none for "
            f"{', '.join(left[:3])} ({len(left)} in all). Does the configuration "
            "describe these weights?"
        )
    return traverse_util.unflatten_dict(params, sep="/")


class _Found:
    """The arrays of a file by name, with or without the name of the whole model."""

    def __init__(self, arrays: Arrays):
        self.arrays, self.names = arrays, set(arrays)
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> np.ndarray:
        short = name.partition(".")[2]
        for known in (name, short):
            if known in self.names:
                self.used.add(known)
                return self.arrays[known]
        raise ValueError(
            f"The weights must have an array {name!r}; got none. Does the "
            "configuration describe these weights?"
        )


def _read(path: str, shape: tuple[int, ...], names: Names, found: _Found) -> np.ndarray:
    name = names.table[path]
    if "{}" not in name:
        return _read_one(path, shape, name, names, found)
    layers = (name.format(i) for i in range(shape[0]))
    return np.stack([_read_one(path, shape[1:], x, names, found) for x in layers])


def _read_one(
    path: str, shape: tuple[int, ...], name: str, names: Names, found: _Found
) -> np.ndarray:
    parts = names.parts(path)
    whole = np.broadcast_to(0, (*shape[:-1], shape[-1] * len(parts)))  # for its shape
    required, array = names.to_file(path, whole).shape, found[name]
    if array.shape != required:
        raise ValueError(
            f"{name} must have the shape {required}, as the configuration says; got "
            f"{array.shape}. Does the configuration describe these weights?"
        )
    return np.split(names.to_file(path, array), len(parts), -1)[parts.index(path)]


def write_params(params: Any, names: Names) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays of a file with these parameters: the inverse of `read_params`."""
    paths = flat(params)
    for path in paths:
        parts, name = names.parts(path), names.table[path]
        if parts[0] == path:
            array = np.concatenate([np.asarray(paths[part]) for part in parts], -1)
            layers = enumerate(array) if "{}" in name else [(0, array)]
            for i, one in layers:
                yield name.format(i), np.ascontiguousarray(names.to_file(path, one))
