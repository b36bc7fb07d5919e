"""That the example of digits is what it says it is."""

import re

import digits_cnn as example
import jax
import numpy as np
import pytest


def test_each_image_is_on_one_side_of_a_split():
    (train, held_out), (_, others) = example.load(0), example.load(1)
    assert len(held_out["label"]) == example.HELD_OUT
    assert len(train["label"]) + len(held_out["label"]) == 1797
    assert not np.array_equal(held_out["image"], others["image"])
    images = np.concatenate([train["image"], held_out["image"]])
    assert images.min() == -1
    assert images.max() == 1
    # The digits have no image twice.
    assert len(np.unique(images, axis=0)) == 1797


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")  # flax needs it
def test_it_learns_and_draws(run, tmp_path, capsys):
    path = tmp_path / "digits.png"
    flags = ["--epsilons", "8", "--steps", "20", "--runs", "2", "--output"]
    run(example, *flags, path)
    rows = re.findall(r"(8\.00|none)  (0\.\d+) \+-", capsys.readouterr().out)
    assert [name for name, _ in rows] == ["8.00", "none"]
    # Guessing is right for 0.1 of the images.
    assert all(float(accuracy) > 0.5 for _, accuracy in rows)
    assert path.stat().st_size > 10_000
