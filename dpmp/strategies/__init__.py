"""Strategies to correlate the noise of steps, so that it partly cancels in their sum.

Parameters are the sum of all updates so far. If the noise of a step subtracts a part of
the noise of the steps before it, the sum has less noise. A *strategy* is a lower
triangular matrix C: the Gaussian mechanism protects C G, where the rows of G are the
sums of clipped gradients of all steps, and the noise of the steps is the inverse of C
times independent noise.

>>> strategy = banded_toeplitz(8, iterations=256)
>>> print(strategy.coefficients[:4])
(1.0, 0.6875, 0.59375, 0.546875)
>>> independent = BandedToeplitz((1.0,), iterations=256)
>>> print(f"{strategy.error():.2f} instead of {independent.error():.2f}")
4.55 instead of 11.34

The matrix C has few bands (`banded_toeplitz`), or its inverse has (`banded_inverse`).
In the first case, an example must not take part twice within the bands. In the second
one, it takes part once in each epoch. So the examples form groups, which take turns:
`DPSGD(strategy=)` draws such batches.

References:
  [Kairouz et al.: Practical and private (deep) learning without sampling or
  shuffling](https://arxiv.org/abs/2103.00039); [Choquette-Choo et al.: (Amplified)
  banded matrix factorization](https://arxiv.org/abs/2306.08153); [McKenna: Scaling up
  the banded matrix factorization mechanism](https://arxiv.org/abs/2405.15913);
  [Kalinin et al.: Back to square roots](https://arxiv.org/abs/2505.12128)
"""

from dpmp.strategies._matrices import BandedInverse, BandedToeplitz, Strategy
from dpmp.strategies._search import banded_inverse, banded_toeplitz

__all__ = [
    "BandedInverse",
    "BandedToeplitz",
    "Strategy",
    "banded_inverse",
    "banded_toeplitz",
]
