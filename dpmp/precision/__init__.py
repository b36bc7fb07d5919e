"""The dtype that the model computes in, and the dtype of its parameters.

>>> policy = Policy.from_name("mixed_bfloat16")
>>> print(policy.cast_to_compute({"w": jnp.ones(2)})["w"].dtype)
bfloat16

`autocast` is for a model that was written in float32. It computes the products of the
model in 16 bits, and keeps sums and exponentials in float32. `in_8_bits` is for the
averages of an optimizer. The dtypes of norms, sums
and noise are not part of a policy: the privacy guarantee depends on them, so they
belong to the mechanism.
"""

from dpmp.precision._autocast import autocast, is_autocast, reference_of
from dpmp.precision._eight_bits import in_8_bits
from dpmp.precision._policy import PRESETS, Policy
from dpmp.precision._rules import name_of

__all__ = [
    "PRESETS",
    "Policy",
    "autocast",
    "in_8_bits",
    "is_autocast",
    "name_of",
    "reference_of",
]
