"""What the tests of self-checks measure: dpmp, sums written in NumPy, few releases."""

from fractions import Fraction

import numpy as np
import pytest

from dpmp.tools.selfcheck._modes import dpmp_subjects
from dpmp.tools.selfcheck._results import Sizes
from dpmp.tools.selfcheck._subjects import BatchShape, Sums

SIZES = Sizes(
    num_entries=2000,
    num_leaves=8,
    largest_batch=256,
    num_training=2**20,
    num_test=2**17,
)
DPMP = dpmp_subjects()


def by_name(subjects):
    return pytest.mark.parametrize("subject", subjects, ids=lambda x: x.name)


def passed(results):
    return [x.passed for x in results]


def sums(summed, *batches):
    """A subject from a function of a clip norm and float32 gradients, (B, n)."""

    def make(l2_clip_norm, microbatch_size):
        del microbatch_size

        def sum_fn(batch, is_padding):
            leaves = [x.reshape(len(x), -1).astype(np.float32) for x in batch]
            return summed(l2_clip_norm, np.concatenate(leaves, axis=1)[~is_padding])

        return sum_fn, Fraction(l2_clip_norm)

    return Sums("broken", True, make, batches or (BatchShape(np.float32, 64),))


def clip(l2_clip_norm, grads, norms):
    return grads * np.minimum(1, l2_clip_norm / np.maximum(norms, 1e-30))[:, None]


def norms_in_float64(grads):
    return np.sqrt(np.sum(np.square(grads, dtype=np.float64), axis=1))


def sum_in_float64(l2_clip_norm, grads):
    clipped = clip(l2_clip_norm, grads, 1.0001 * norms_in_float64(grads))
    return [np.sum(clipped, axis=0)[None]]
