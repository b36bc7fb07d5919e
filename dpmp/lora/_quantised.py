"""Arrays that stay quantised in memory: a node of a tree that stands for one array.

It is an array of qwix, or any node with a method `dequantize()` and the `shape` and the
`dtype` of its result. In a stack of layers, each of its parts has an axis of layers.
"""

import sys
from typing import Any

import jax

from dpmp import _validate


def is_quantised(x: Any) -> bool:
    """Whether a node of a tree is a quantised array."""
    return _is_of_qwix(x) or callable(getattr(x, "dequantize", None))


def _is_of_qwix(x: Any) -> bool:
    qwix = sys.modules.get("qwix")  # whoever has such an array has imported it
    return qwix is not None and isinstance(x, qwix.QArray)


def dequantised(x: Any) -> Any:
    """The dequantised array. Other values stay as they are."""
    if _is_of_qwix(x):
        return sys.modules["qwix"].dequantize(x)
    return x.dequantize() if is_quantised(x) else x


def shape_of(x: Any) -> Any:
    """The shape of a quantised array when dequantised. Other values stay."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if is_quantised(x) else x


def type_of(x: Any) -> str:
    """The dtype of an array, and whether it is quantised."""
    return f"quantised {x.dtype}" if is_quantised(x) else str(x.dtype)


def check_leading(x: Any) -> None:
    """Raises ValueError if the slices of a quantised array share scales."""
    sizes = {part.shape[0] for part in jax.tree.leaves(x)} if is_quantised(x) else {}
    if len(sizes) > 1:
        _validate.fail(
            "layers of a stack must not share the scales of their quantisation. Name "
            "axis 0 in `channelwise_axes` of qwix.quantize.",
            sizes=sorted(sizes),
        )
