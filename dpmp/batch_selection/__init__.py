"""Draws the indices of the examples that take part in a step.

Random batches make training more private, because an example takes part in few steps.
The accountant counts on this gain, which is proved for two ways to draw them. By
Poisson sampling, every example is in every batch with the same probability. By random
allocation, every example is in one batch of each epoch, drawn uniformly. In both, the
examples are independent of each other. The indices of a batch and its size are
sensitive.
"""

from dpmp.batch_selection._allocation import RandomAllocation
from dpmp.batch_selection._draws import SAMPLING_TOTAL_VARIATION
from dpmp.batch_selection._poisson import PoissonSampling, pad_indices

__all__ = [
    "SAMPLING_TOTAL_VARIATION",
    "PoissonSampling",
    "RandomAllocation",
    "pad_indices",
]
