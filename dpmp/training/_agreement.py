"""Refuses processes of one job that differ, before a step can depend on it.

All processes of a job add the same noise. If they added it to different sums, the
difference of what they release would have none. So everything that a sum is made of is
compared: data, state, arrays of the loss, options and the compiled program.
"""

import os
import re
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import _processes, _validate, runs
from dpmp._processes import are_equal, span_all
from dpmp._typing import PyTree
from dpmp.mechanism import DPSGD
from dpmp.sources import Load

# Flags of XLA that may differ: where to write, and how many devices.
_FLAGS_OF_ONE = "--xla_dump", "--xla_force_host_platform_device_count"


def check_same_data(
    load: Load, mechanism: DPSGD, sharding: Any, plan: Any, key_digest: bytes | None
) -> None:
    """Raises ValueError on all processes unless they have the same data and plan.

    If two had different data, one example could enter a sum twice. `key_digest` is a
    hash of the random key: the key itself would stand in reports of variables.
    """
    if jax.process_count() == 1:
        return
    seed = np.random.SeedSequence(int(_processes.random_id(), 16))
    indices = np.random.default_rng(seed).integers(mechanism.num_examples, size=16)
    devices = _layout(sharding, (mechanism.padded_batch_size,))
    error, facts = None, [repr((mechanism, devices, plan, key_digest)).encode()]
    try:
        rows = jax.tree_util.tree_leaves_with_path(load(np.unique(indices)))
        facts += [f"{p}{x.dtype}{x.shape}".encode() + x.tobytes() for p, x in rows]
    except Exception as failure:  # the others must not wait for this process
        error, facts = failure, [str(jax.process_index()).encode()]
    are_same = are_equal(*facts)
    if error is not None:
        raise error
    if not are_same:
        _validate.fail(
            "all processes must have the same mechanism, prng_key and options of fit, "
            "and the same data in one order. Read the same files everywhere. If they "
            "are the same, one process cannot load its data; its error says more.",
            num_processes=jax.process_count(),
        )


def check_same_past(spent: runs.Spent) -> None:
    """Raises RuntimeError on all processes unless they count the same past steps."""
    if not are_equal(bytes(spent.to_array())):
        _validate.fail(
            "all processes must have the same past steps, including those that "
            "failed. Start all processes again, and go on from a saved state.",
            num_processes=jax.process_count(),
            error=RuntimeError,
        )


def check_same_arrays(tree: Any) -> None:
    """Raises ValueError on all processes unless they hold the same values."""
    if not _are_replicas_equal(tree):
        _validate.fail(
            "all processes must have the same state, and the same arrays that the "
            "loss and the optimizer close over. Make or restore them in the same way "
            "everywhere.",
            num_processes=jax.process_count(),
        )


def check_same_program(lowered: jax.stages.Lowered) -> None:
    """Raises ValueError on all processes unless they run the same program."""
    if jax.process_count() == 1:
        return
    # A call of the host has an address, which is of one process.
    text = "\n".join(
        re.sub(r"\d+", "", line) if "callback" in line else line
        for line in lowered.as_text().splitlines()
    )
    # Flags of the compiler change how a sum is rounded.
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags = sorted(x for x in flags if not x.startswith(_FLAGS_OF_ONE))
    if not are_equal(text.encode(), repr((flags, jax.__version__)).encode()):
        _validate.fail(
            "all processes must have the same loss, optimizer, mechanism and policy, "
            "the same XLA_FLAGS and one version of jax. Build them in the same way "
            "everywhere.",
            num_processes=jax.process_count(),
        )


def check_spans_processes(batch: PyTree) -> None:
    """Raises ValueError for a batch of one process alone, where there are several."""
    is_shared = [
        isinstance(x, jax.Array) and span_all(x.sharding)
        for x in jax.tree.leaves(batch)
    ]
    if jax.process_count() != 1 and not all(is_shared):
        _validate.fail(
            "a batch must be committed to devices of all processes, which use the "
            "same noise. Use trainer.load_batch, or "
            "jax.make_array_from_process_local_data.",
            num_processes=jax.process_count(),
        )


def _are_replicas_equal(tree: Any) -> bool:
    """Whether the parts of arrays that several processes hold have equal checksums."""
    if jax.process_count() == 1:
        return True
    leaves = jax.tree.leaves(tree)
    layouts = [
        _layout(x.sharding, x.shape) if isinstance(x, jax.Array) else "" for x in leaves
    ]
    rows = [row for x in leaves for row in _checksums(x)]
    if not are_equal(str((len(rows), layouts)).encode()):
        return False
    sums = _processes.gathered(np.array(rows, np.uint32))
    return bool(np.all((sums == 0) | (sums == sums.max(0))))


def _checksums(x: Any) -> list[int]:
    """A checksum of each part of an array; 0 for a part that others hold."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)  # the parts of keys have other indices
    if not isinstance(x, jax.Array):
        return [_checksum(x)]
    parts = map(str, x.sharding.devices_indices_map(x.shape).values())
    own = {str(part.index): part.data for part in x.addressable_shards}
    return [_checksum(own[i]) if i in own else 0 for i in sorted({*parts})]


def _checksum(x: Any) -> int:
    return zlib.crc32(np.asarray(x).tobytes()) | 1  # 0 stands for no part


def _layout(sharding: jax.sharding.Sharding | None, shape: tuple[int, ...]) -> str:
    """Which part of an array each device has; empty for devices of one process."""
    if sharding is None or not span_all(sharding):
        return ""
    parts = sharding.devices_indices_map(shape)
    return str(sorted((device.id, str(part)) for device, part in parts.items()))
