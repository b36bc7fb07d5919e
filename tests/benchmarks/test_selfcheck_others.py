import numpy as np
import pytest


def test_a_mean_of_the_batch_and_noise_for_it_are_found(monkeypatch):
    pytest.importorskip("jax_privacy")
    from benchmarks import selfcheck_others

    def average(gradients, adds_noise):
        norms = np.maximum(np.linalg.norm(gradients, axis=1, keepdims=True), 1)
        noise = np.random.default_rng(0).normal(size=gradients.shape[1])
        total = np.sum(gradients / norms, axis=0) + adds_noise * noise / len(gradients)
        return total / len(gradients)

    mean = selfcheck_others.Mean("mine", False, average)
    monkeypatch.setattr(selfcheck_others, "means", lambda: [mean])
    change, noise = selfcheck_others.measure_means()
    assert not change.passed
    assert 1.5 < change.value < 2
    assert not noise.passed
    assert noise.value == pytest.approx(1 / 32, rel=0.02)
