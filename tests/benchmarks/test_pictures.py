"""The pictures of the guides can be drawn, and say what is true."""

import numpy as np
import pytest

from benchmarks import pictures


@pytest.mark.slow
@pytest.mark.parametrize("name", pictures.DRAWN)
def test_a_picture_is_drawn(name):
    assert pictures.DRAWN[name]().axes
    assert (pictures.OUTPUT / f"{name}.svg").exists()


def test_running_sums_change_by_more_than_the_clip_norm():
    # The others err by a spacing each two: 2048 / 2 of 2^-12.
    assert pictures._change_of_running_sum(4096, np.float32) == 1.25
