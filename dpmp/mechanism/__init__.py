"""DPSGD describes one private training run: sampling, clipping, arithmetic and noise.

>>> mechanism = DPSGD(
...     num_examples=10_000, expected_batch_size=100, iterations=500, l2_clip_norm=1.0
... ).calibrate(epsilon=4.0, delta=1e-6)
>>> print(f"{mechanism.guarantee(step=100).epsilon:.2f}")
2.80

The training steps and the privacy accounting read the same object, so that they cannot
disagree.
"""

from dpmp.mechanism._dpsgd import DPSGD
from dpmp.mechanism._released import Released

__all__ = ["DPSGD", "Released"]
