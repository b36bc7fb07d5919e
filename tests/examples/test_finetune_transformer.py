"""That the example is what it says it is."""

import json

import finetune_transformer as example
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from programs import equations

from dpmp import Policy


def test_products_are_in_the_dtype_of_the_policy():
    policy = Policy.from_name("mixed_bfloat16", float32_paths=example.IN_FLOAT32)
    with jax.numpy_dtype_promotion("standard"):  # flax needs it
        model = nnx.eval_shape(lambda: example.Transformer(nnx.Rngs(0)))
        graphdef, params = nnx.split(model, nnx.Param)
        params = jax.eval_shape(policy.cast_to_compute, params)
        tokens = jax.ShapeDtypeStruct((1, example.CONTEXT + 1), jnp.int32)

        def loss(params):
            return jnp.sum(example.losses(graphdef, params, jnp.zeros_like(tokens))[0])

        eqns = equations(jax.make_jaxpr(loss)(params).jaxpr)
    products = [eqn for eqn in eqns if eqn.primitive.name == "dot_general"]
    assert products
    for eqn in products:
        assert {str(v.aval.dtype) for v in eqn.invars} == {str(policy.compute_dtype)}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data", "nowhere.jsonl"], "--data: there is no file"),
        (["--batch-size", "0"], "--batch-size must be from 1 to 2"),
        (["--delta", "0.1"], "--delta must be below 1 / 2"),
        (["--output", __file__], "--output must be a directory"),
        (["--generate", "nowhere"], "--generate: nowhere has no parameters"),
    ],
)
@jax.numpy_dtype_promotion("standard")  # flax needs it
def test_bad_flags_stop_it_before_any_training(
    run, monkeypatch, tmp_path, records, flags, message
):
    monkeypatch.setattr(example, "pretrain", lambda *_: pytest.fail("it trained"))
    defaults = ["--data", records, "--output", tmp_path / "out"]
    with pytest.raises(SystemExit, match=message):
        run(example, *defaults, *flags)


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")  # flax needs it
def test_a_run_without_pretraining_can_be_loaded_again(run, tmp_path, records, capsys):
    out = tmp_path / "out"
    flags = ["--compare", "--data", records, "--output", out, "--delta", "1e-4"]
    run(example, *flags, "--pretraining-steps", "0", "--steps", "1")
    report = json.loads((out / "report.json").read_text())
    assert report["is_private"] is True
    assert report["epsilon"] <= 8
    assert report["delta"] == 1e-4
    assert report["neighboring_relation"] == "REPLACE_SPECIAL"
    assert "differentially private" in report["statement"]
    assert report["settings"]["compare"] is True
    assert {*report["nats_per_byte"]} == {"before", "after"}
    assert "without_privacy" in report
    assert "without any protection" in report["statement"]
    written = capsys.readouterr().out.split("fine-tuned model\n")[1].split("\n\n")[0]
    run(example, "--generate", out)
    generated = capsys.readouterr().out
    assert [line.strip() for line in generated.split()] == written.split()
