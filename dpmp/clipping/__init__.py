"""Sums of clipped per-example gradients, with a bound on their sensitivity.

Clipping scales the gradient of each example down to a norm of at most the clip norm,
before the gradients are added up. The sensitivity is the largest change of the sum when
one example changes. The bound holds for the computed numbers, rounding included, except
for sums whose arithmetic has a name that begins with "unproved".

>>> grad_fn = clipped_grad(lambda w, x: jnp.mean((x - w) ** 2), l2_clip_norm=1.0)
>>> sum_of_clipped_grads = grad_fn(3.0, jnp.array([0.0, 7.0, -2.0]))
>>> print(grad_fn.sensitivity())
1.0

`clipped_fun` clips and sums the outputs of any function, and `clip_pytree` clips one
tree. Their results are sensitive until noise is added (`dpmp.noise_addition`).
"""

from dpmp.clipping._adaptive import AdaptiveClipNorm
from dpmp.clipping._callables import (
    BoundedSensitivityCallable,
    sensitivity,
    specs_of_examples,
)
from dpmp.clipping._clip_norms import AutomaticClipping, ClipNorms
from dpmp.clipping._clipped_fun import clip_pytree, clipped_fun
from dpmp.clipping._clipped_grad import AuxiliaryOutput, clipped_grad
from dpmp.clipping._joint_sums import (
    JointCoordinates,
    JointSum,
    Released,
    ReleasedMetrics,
    contribution,
    with_clip_norm,
)
from dpmp.clipping._shards import Shards

__all__ = [
    "AdaptiveClipNorm",
    "AutomaticClipping",
    "AuxiliaryOutput",
    "BoundedSensitivityCallable",
    "ClipNorms",
    "JointCoordinates",
    "JointSum",
    "Released",
    "ReleasedMetrics",
    "Shards",
    "clip_pytree",
    "clipped_fun",
    "clipped_grad",
    "contribution",
    "sensitivity",
    "specs_of_examples",
    "with_clip_norm",
]
