"""The pictures of the guides say what is true."""

import numpy as np

from benchmarks import pictures


def test_running_sums_change_by_more_than_the_clip_norm():
    # The others err by a spacing each two: 2048 / 2 of 2^-12.
    assert pictures._change_of_running_sum(4096, np.float32) == 1.25
