"""Poisson sampling: draws the indices of a batch from a key and a step number.

Random batches make training more private, because an example takes part in few steps.
The accountant counts on this gain, which is proved for Poisson sampling: every example
is in a batch with the same probability, independently of all other examples. The
indices of a batch and its size are sensitive.
"""

from dpmp.batch_selection._binomial import SAMPLING_TOTAL_VARIATION
from dpmp.batch_selection._poisson import PoissonSampling, pad_indices

__all__ = ["SAMPLING_TOTAL_VARIATION", "PoissonSampling", "pad_indices"]
