"""Which dtype the model computes in, and which its parameters are kept in.

>>> policy = Policy.from_name("mixed_bfloat16")
>>> print(policy.cast_to_compute({"w": jnp.ones(2)})["w"].dtype)
bfloat16

`autocast` is for a model that was written in float32: it computes its products in 16
bits and leaves the rest as it is. The dtypes of norms, sums and noise are not here:
they decide what the privacy claim is, and belong to the mechanism.
"""

from dpmp.precision._autocast import autocast
from dpmp.precision._policy import PRESETS, Policy

__all__ = ["PRESETS", "Policy", "autocast"]
