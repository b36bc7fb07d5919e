"""Sums of clipped per-example gradients, with a sensitivity that the floats keep.

>>> grad_fn = clipped_grad(lambda w, x: jnp.mean((x - w) ** 2), l2_clip_norm=1.0)
>>> sum_of_clipped_grads = grad_fn(3.0, jnp.array([0.0, 7.0, -2.0]))
>>> print(grad_fn.sensitivity())
1.0

`clipped_fun` does the same with the output of any function, `clip_pytree` with one
tree. What all of them return is sensitive until noise has been added to it
(`dpmp.noise_addition`).
"""

from dpmp.clipping._clip_pytree import clip_pytree
from dpmp.clipping._clipped_fun import clipped_fun
from dpmp.clipping._clipped_grad import AuxiliaryOutput, clipped_grad
from dpmp.clipping._joint_sums import JointSum, ReleasedMetrics
from dpmp.clipping._sensitivity import BoundedSensitivityCallable

__all__ = [
    "AuxiliaryOutput",
    "BoundedSensitivityCallable",
    "JointSum",
    "ReleasedMetrics",
    "clip_pytree",
    "clipped_fun",
    "clipped_grad",
]
