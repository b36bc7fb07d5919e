"""The models equal those of transformers, and a saved one equals the loaded one."""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lora.subjects import trained

from dpmp import lora
from examples import llm
from examples.llm import pretrained


def test_logits_equal_those_of_transformers(folder, expected):
    model = llm.load(folder)
    logits = jax.jit(model.apply)(model.params, expected["tokens"])
    assert logits.dtype == jnp.float32
    # The rounding of some tens of float32 operations on logits of up to 4.
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-4)
    # A token does not see later ones.
    tokens = expected["tokens"].copy()
    tokens[:, 8:] = (tokens[:, 8:] + 1) % model.config.vocabulary_size
    changed = jax.jit(model.apply)(model.params, tokens)
    np.testing.assert_allclose(changed[:, :8], logits[:, :8], atol=1e-4)
    assert np.abs(changed[:, 8:] - logits[:, 8:]).max() > 0.1
    # One sequence needs no batch axis.
    assert jax.eval_shape(model.apply, model.params, expected["tokens"][0]).ndim == 2
    with pytest.raises(ValueError, match="at most 32 tokens; got 33"):
        model.apply(model.params, jnp.zeros(33, jnp.int32))


def test_products_are_in_the_dtype_of_the_parameters(folder, expected):
    model = llm.load(folder, dtype=jnp.bfloat16)
    dtypes = {str(x.dtype) for x in jax.tree.leaves(model.params)}
    assert dtypes == {"bfloat16"}
    logits = jax.jit(model.apply)(model.params, expected["tokens"])
    assert logits.dtype == jnp.float32
    error = np.abs(logits - expected["logits"]).max()
    # bfloat16 has 8 bits; logits of up to 4 sum 16 products of rounded operands.
    assert 1e-3 < error < 0.2


@pytest.mark.parametrize("remat", [False, True])
def test_book_keeping_has_a_rule_for_every_parameter(
    check_rules, folder, expected, remat
):
    model = llm.load(folder, dtype=jnp.bfloat16, remat=remat)
    loss = functools.partial(llm.mean_nats, model.apply)
    is_target = np.ones(expected["tokens"].shape, bool)
    batch = {"tokens": expected["tokens"], "is_target": is_target}
    check_rules(loss, model.params, batch)
    program = str(jax.make_jaxpr(jax.grad(loss))(model.params, batch))
    assert ("remat" in program) == remat


def test_a_saved_model_is_the_loaded_one(folder, tmp_path):
    model = llm.load(folder, dtype="bfloat16")
    llm.save(tmp_path / "saved", model)
    again = llm.load(tmp_path / "saved", dtype="bfloat16")
    assert again.config == model.config
    assert again.tokenizer.digest == model.tokenizer.digest
    jax.tree.map(np.testing.assert_array_equal, model.params, again.params)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"


def test_transformers_loads_what_is_saved(folder, expected, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    ours = llm.load(folder)
    llm.save(tmp_path / "saved", ours)
    auto = transformers.AutoModelForCausalLM
    model, report = auto.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        logits = model(torch.from_numpy(expected["tokens"]).long()).logits.numpy()
    np.testing.assert_array_equal(logits, expected["logits"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    text = "in the 12. hen"
    assert tokenizer.encode(text) == ours.tokenizer.encode(text)


@pytest.mark.parametrize("model_name", ["llama", "gpt2"])
@pytest.mark.filterwarnings("default")
@jax.numpy_dtype_promotion("standard")
def test_peft_computes_the_same_logits(folder, model_name, tmp_path):
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    model = llm.load(folder)
    adapters = trained(lora.init(jax.random.key(0), model.params, 2, "layers/.*kernel"))
    names = functools.partial(llm.huggingface_name, architecture=model_name)
    config = {"task_type": "CAUSAL_LM", "fan_in_fan_out": model_name == "gpt2"}
    options = {"initial": None, "names": names, "config": config}
    lora.save(tmp_path / "adapter", adapters, model.params, **options)
    tokens = np.arange(12)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        given = theirs(torch.tensor(tokens[None])).logits[0].numpy()
    expected = lora.apply(model.apply, model.params)(adapters, jnp.asarray(tokens))
    np.testing.assert_allclose(given, expected, atol=1e-4)
    unchanged = model.apply(model.params, jnp.asarray(tokens))
    assert np.max(np.abs(given - unchanged)) > 0.01


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"kernel": np.zeros((2, 16, 4))}, r"query/kernel .*\(2, 16, 16\).* 16, 4\)"),
        ({"adapter": np.zeros(3)}, r"query/adapter must .* shape None.* got \(3,\)"),
        ({}, r"query/kernel must have .* got None"),
    ],
)
def test_parameters_of_another_model_are_not_saved(llama, tmp_path, query, message):
    model = llm.load(llama)
    attention = model.params["layers"]["attention"]
    attention["query"] = (attention["query"] if "adapter" in query else {}) | query
    with pytest.raises(ValueError, match=message):
        llm.save(tmp_path / "saved", model)
    assert not (tmp_path / "saved").exists()


def test_a_missing_package_is_named(llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    message = r"tokenizers.*pip install '.\[llm\]'"
    with pytest.raises(ModuleNotFoundError, match=message):
        pretrained.load(llama)
