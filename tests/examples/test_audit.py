"""That the example attacks what it trains, and draws what a mechanism allows."""

import dataclasses

import audit as example
import finetune_transformer
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ledgers import MECHANISM
from scipy import stats

SETTINGS = example.Settings(40, 60, 8, batch_size=25, steps=2, learning_rate=0.1)


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")  # flax needs it
def test_an_empty_record_has_no_gradient():
    graphdef, params = nnx.split(finetune_transformer.Transformer(nnx.Rngs(0)))
    tokens = finetune_transformer.encode(["", "a"])[:, :4]

    @jax.jit
    @jax.grad
    def gradient(params, tokens):
        return finetune_transformer.losses(graphdef, params, tokens)[0][0]

    empty, full = (gradient(params, x[None]) for x in tokens)
    assert not any(map(jnp.any, jax.tree.leaves(empty)))
    assert any(map(jnp.any, jax.tree.leaves(full)))


def test_rates_of_an_attacker():
    is_in = np.array([True, False, True, False])
    false, true = example.rates(np.array([1, 4, 2, 3]), is_in)
    np.testing.assert_array_equal(false, [0, 0, 0.5, 1])
    np.testing.assert_array_equal(true, [0.5, 1, 1, 1])


def test_the_bound_on_rates_is_that_of_the_gaussian_mechanism():
    mechanism = dataclasses.replace(MECHANISM, iterations=1, noise_multiplier=0.8)
    false = np.array([0.01, 0.1, 0.5])
    exact = stats.norm.cdf(stats.norm.ppf(false) + 1 / 0.8)
    bound = example.largest_rates(mechanism, false)
    assert np.all(bound >= exact - 1e-6)
    np.testing.assert_allclose(bound, exact, rtol=0.03)


def test_it_tells_a_model_that_remembers_from_one_that_does_not(
    run, monkeypatch, tmp_path, capsys
):
    seen = []

    def tune(mechanism, texts):
        seen.append(texts)
        return () if mechanism.is_private else texts

    def losses(params, texts):
        return np.array([-(x in params) for x in texts], float), None

    task = example.Task(np.zeros(2), list, tune, losses)
    monkeypatch.setattr(example, "transformer", lambda *_: task)
    monkeypatch.setattr(example, "TRANSFORMER", SETTINGS)
    monkeypatch.setattr(example, "largest_rates", lambda mechanism, false: false)
    docstrings = [f"record {i}" for i in range(50)]
    monkeypatch.setattr(
        example, "private_and_held_out", lambda _: (docstrings, docstrings[40:])
    )
    output = tmp_path / "new" / "audit.svg"
    run(example, "--output", output)
    assert seen[0] == seen[1]
    assert len(seen[0]) == 100
    canaries = [x for x in seen[0] if x.startswith("The code of")]
    assert 15 < len(canaries) < 45  # the others are not in the data
    assert len({*canaries}) == len(canaries) == 60 - seen[0].count("")
    assert {len(x) for x in canaries} == {len("The code of kwbzm is 384120.")}
    private, plain = capsys.readouterr().out.split("without privacy: ")
    assert "finds 100.0% of those" in plain
    assert "finds 100.0% of those" not in private
    assert "blind guesses" in output.read_text()


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")  # flax needs it
def test_the_transformer_runs(run, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(example, "TRANSFORMER", SETTINGS)
    monkeypatch.setattr(example, "PRETRAINING_STEPS", 0)
    run(example, "--output", tmp_path / "audit.svg", "--delta", "1e-4")
    assert capsys.readouterr().out.count("60 canaries: an attacker") == 2
