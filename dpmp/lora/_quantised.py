"""Arrays that qwix has quantised: numbers of few bits, and scales of blocks of them.

qwix need not be installed: whoever has such an array has imported it.
"""

import sys
from typing import Any

import jax

from dpmp import _validate


def is_quantised(x: Any) -> bool:
    """Whether a node of a tree is a `qwix.QArray`."""
    qwix = sys.modules.get("qwix")
    return qwix is not None and isinstance(x, qwix.QArray)


def dequantised(x: Any) -> Any:
    """The array in the dtype of its scales. Other values stay as they are."""
    return sys.modules["qwix"].dequantize(x) if is_quantised(x) else x


def shape_of(x: Any) -> Any:
    """The shape of a quantised array when dequantised. Other values stay."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if is_quantised(x) else x


def check_leading(x: Any) -> None:
    """Raises ValueError if the slices of a quantised array share scales."""
    if is_quantised(x) and x.shape[0] != x.scale.shape[0]:
        _validate.fail(
            "layers of a stack must not share the scales of their quantisation. Name "
            "axis 0 in `channelwise_axes` of qwix.quantize.",
            shape=x.shape,
            scales=x.scale.shape,
        )
