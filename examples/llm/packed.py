"""Weights of GGUF files that stay packed in memory, as `dpmp.lora` takes them.

A file has blocks of 32 inputs. A weight is `value * scale + offset`, with a value of
four or eight bits, and the scale and the offset of its block.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

KINDS = ("Q4_1", "Q8_0")
_BLOCK = 32


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scales", "offsets"],
    meta_fields=["axis", "dtype"],
)
@dataclasses.dataclass(frozen=True)
class Packed:
    """A packed array.

    Attributes:
      values: the values, uint4 or int8, in the shape of the array.
      scales: one float16 number for each block.
      offsets: as the scales, or None for zeros.
      axis: the axis of inputs, counted from the last one.
      dtype: the dtype of the weights.
    """

    values: jax.Array
    scales: jax.Array
    offsets: jax.Array | None
    axis: int
    dtype: Any

    shape = property(lambda self: self.values.shape)

    def dequantize(self) -> jax.Array:
        """The weights, computed in float32 and rounded to `dtype`."""
        axis = self.values.ndim + self.axis
        shape = self.scales.shape
        blocks = (*shape[: axis + 1], _BLOCK, *shape[axis + 1 :])
        weights = self.values.reshape(blocks).astype(jnp.float32)
        weights *= jnp.expand_dims(self.scales.astype(jnp.float32), axis + 1)
        if self.offsets is not None:
            weights += jnp.expand_dims(self.offsets.astype(jnp.float32), axis + 1)
        return weights.reshape(self.shape).astype(self.dtype)

    def astype(self, dtype: Any) -> "Packed":
        """The same array with weights of another dtype."""
        return dataclasses.replace(self, dtype=jnp.dtype(dtype))


def read_blocks(data: np.ndarray, kind: str) -> np.ndarray:
    """The entries of (outputs, bytes) with the fields value, scale and offset.

    So they can be sorted, transposed and stacked like numbers.
    """
    size = {"Q4_1": 2 + 2 + _BLOCK // 2, "Q8_0": 2 + _BLOCK}[kind]
    blocks = np.ascontiguousarray(data).reshape(len(data), -1, size)
    if kind == "Q8_0":
        values, offset = blocks[..., 2:].view(np.int8), np.float16(0)
    else:
        halves, offset = blocks[..., 4:], blocks[..., 2:4].view(np.float16)
        values = np.concatenate([halves & 15, halves >> 4], -1)
    fields = [("value", values.dtype), ("scale", np.float16), ("offset", np.float16)]
    entries = np.empty(values.shape, fields)
    entries["value"], entries["offset"] = values, offset
    entries["scale"] = blocks[..., :2].view(np.float16)
    return entries.reshape(len(data), -1)


def to_array(entries: np.ndarray, axis: int, dtype: Any) -> Packed:
    """Packs entries; `axis` has the inputs, and is counted from the last one."""
    of_blocks = [slice(None)] * entries.ndim
    of_blocks[axis] = slice(None, None, _BLOCK)
    values, blocks = entries["value"], entries[tuple(of_blocks)]
    offsets = jnp.asarray(blocks["offset"]) if blocks["offset"].any() else None
    kind = jnp.uint4 if values.dtype == np.uint8 else jnp.int8
    scales = jnp.asarray(blocks["scale"])
    return Packed(jnp.asarray(values, kind), scales, offsets, axis, jnp.dtype(dtype))
