"""Loads the rows of a batch onto the devices that need them.

Every process of a job draws the same indices and loads only the rows of its own
devices. With microbatches of m examples for each device, the first m examples go to the
first device, the next m to the second, and so on, in turn. So all devices have about
equally many examples, and a microbatch holds the same examples in the same places on
any number of devices.
"""

from typing import Any

import jax
import numpy as np

from dpmp import _processes, _validate
from dpmp._typing import PyTree
from dpmp._warnings import warn
from dpmp.batch_selection import pad_indices
from dpmp.mechanism import DPSGD
from dpmp.sources._source import Load, load_padded


def check_sharding(sharding: Any, mechanism: DPSGD) -> None:
    """Raises ValueError unless `sharding` can divide the batches of `mechanism`."""
    if sharding is None and jax.process_count() != 1:
        _validate.fail(
            "batch_sharding must be given if there are several processes. Use "
            'jax.NamedSharding(mesh, jax.P("data")) with a mesh of all devices.',
            num_processes=jax.process_count(),
        )
    if sharding is None:
        return
    fix = 'Use jax.NamedSharding(mesh, jax.P("data")).'
    _validate.instance(jax.sharding.Sharding, fix, batch_sharding=sharding)
    if not _processes.span_all(sharding):
        _validate.fail(
            "batch_sharding must have devices of every process. Otherwise processes "
            "would add the same noise to different sums. Use a mesh of jax.devices().",
            num_processes=jax.process_count(),
        )
    spec = tuple(getattr(sharding, "spec", ()))
    if any(spec[1:]):
        _validate.fail(
            "batch_sharding must divide a batch along its first axis, that of the "
            "examples, and along no other",
            fix=fix,
            batch_sharding=jax.P(*spec),
        )
    num_shards = _num_shards(sharding)
    for name in ("padded_batch_size", "microbatch_size"):
        size = getattr(mechanism, name)
        if size is not None and size % num_shards != 0:
            _validate.fail(
                f"{name} must be a multiple of the {num_shards} parts into which "
                "batch_sharding divides a batch. Build the mechanism with a "
                f"microbatch_size that is a multiple of {num_shards}; batches are "
                "padded to a multiple of it.",
                size=size,
            )


def check_devices(params: PyTree, batch_sharding: Any) -> None:
    """Raises ValueError if batches and parameters are to be on different devices.

    Warns if several devices are to compute the same.
    """
    arrays = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
    spread = [x.sharding for x in arrays if len(x.sharding.device_set) > 1]
    if not spread:
        return
    is_divided = batch_sharding is not None and (
        not batch_sharding.is_fully_replicated
        or not all(x.is_fully_replicated for x in spread)
    )
    if not is_divided:
        warn(
            "the parameters are on several devices, but batches are not divided "
            "among them, so that each device may compute the whole step. Pass "
            'batch_sharding=jax.NamedSharding(mesh, jax.P("data")), or jax.P() for '
            "devices that divide the model alone."
        )
    if batch_sharding is None:
        return
    given = [_described(x) for x in (*spread, batch_sharding)]
    is_same = all(x.device_set == batch_sharding.device_set for x in spread)
    divided = [x for x in (*spread, batch_sharding) if not x.is_fully_replicated]
    meshes = {x.mesh.axis_names for x in divided if isinstance(x, jax.NamedSharding)}
    if not is_same or len(meshes) > 1:
        _validate.fail(
            "batch_sharding must have the mesh of the parameters, with its devices and "
            "axes. Use one mesh for both.",
            of_batches=given[-1],
            of_parameters=sorted({*given[:-1]}),
        )


def _described(sharding: Any) -> str:
    shape = dict(sharding.mesh.shape) if hasattr(sharding, "mesh") else ""
    return f"{len(sharding.device_set)} devices {shape}".rstrip()


def load_shards(
    load: Load, indices: np.ndarray, mechanism: DPSGD, sharding: Any
) -> tuple[PyTree, Any]:
    """Loads a padded batch and `is_padding_example`, committed to a sharding if any."""
    batch_size = mechanism.padded_batch_size
    padded = pad_indices(indices, batch_size)
    if sharding is None:
        return load_padded(load, padded), padded < 0
    if isinstance(sharding, jax.NamedSharding):
        # P("data", None) is for arrays of two axes, and labels have one.
        sharding = sharding.update(spec=jax.P(*sharding.spec[:1]))
    if mechanism.microbatch_size is not None:
        # Each shard in turn gets a part of a microbatch.
        num_shards = _num_shards(sharding)
        part_size = mechanism.microbatch_size // num_shards
        parts = padded.reshape(-1, num_shards, part_size)
        padded = parts.swapaxes(0, 1).reshape(-1)
    own_parts = sharding.addressable_devices_indices_map((batch_size,)).values()
    own = padded[np.unique([np.arange(batch_size)[part[0]] for part in own_parts])]

    def commit(x: np.ndarray) -> jax.Array:
        shape = batch_size, *x.shape[1:]
        return jax.make_array_from_process_local_data(sharding, x, shape)

    return jax.tree.map(commit, (load_padded(load, own), own < 0))


def _num_shards(sharding: Any) -> int:
    """The number of parts into which a sharding divides the first axis."""
    # An axis with one entry for each device: the size of a shard tells the number.
    length = len(sharding.device_set)
    return length // sharding.shard_shape((length,))[0]
