"""The models equal those of transformers, and a saved one equals the loaded one."""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpmp
from examples import llm
from examples.llm import pretrained
from examples.llm._names import flat


def batch_of(tokens):
    return {"tokens": tokens, "is_target": np.ones(tokens.shape, bool)}


def test_logits_equal_those_of_transformers(folder, expected):
    model = llm.load(folder)
    logits = jax.jit(model.apply)(model.params, expected["tokens"])
    assert logits.dtype == jnp.float32
    # The rounding of some tens of float32 operations on logits of up to 4.
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-4)


def test_one_sequence_needs_no_batch_axis(folder, expected):
    model = llm.load(folder)
    logits = model.apply(model.params, expected["tokens"][0])
    np.testing.assert_allclose(logits, expected["logits"][0], rtol=0, atol=1e-4)


def test_a_token_does_not_see_later_ones(folder, expected):
    model = llm.load(folder)
    tokens = expected["tokens"].copy()
    tokens[:, 8:] += 1
    logits = model.apply(model.params, tokens % model.config.vocabulary_size)
    np.testing.assert_allclose(logits[:, :8], expected["logits"][:, :8], atol=1e-4)
    assert np.abs(logits[:, 8:] - expected["logits"][:, 8:]).max() > 0.1


def test_remat_changes_the_program_but_not_the_gradients(llama):
    batch = batch_of(np.arange(20, dtype=np.int32)[None])
    grads, programs = [], []
    for remat in (False, True):
        model = llm.load(llama, remat=remat)
        grad = jax.grad(functools.partial(llm.mean_nats, model.apply))
        programs.append(str(jax.make_jaxpr(grad)(model.params, batch)))
        grads.append(jax.jit(grad)(model.params, batch))
    assert ["remat" in program for program in programs] == [False, True]
    for left, right in zip(*map(jax.tree.leaves, grads), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-5)


def test_products_are_in_the_dtype_of_the_parameters(folder, expected):
    model = llm.load(folder, dtype=jnp.bfloat16)
    dtypes = {str(x.dtype) for x in jax.tree.leaves(model.params)}
    assert dtypes == {"bfloat16"}
    logits = model.apply(model.params, expected["tokens"])
    assert logits.dtype == jnp.float32
    error = np.abs(logits - expected["logits"]).max()
    # bfloat16 has 8 bits; logits of up to 4 sum 16 products of rounded operands.
    assert 1e-3 < error < 0.2


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_book_keeping_has_a_rule_for_every_parameter(folder, expected, dtype, remat):
    model = llm.load(folder, dtype=dtype, remat=remat)
    loss = functools.partial(llm.mean_nats, model.apply)
    batch = batch_of(expected["tokens"])
    summary = dpmp.book_keeping.summarize(loss, model.params, batch)
    rules = {rule for row in summary.rows for rule in row.rules}
    assert rules <= {"dot", "gather", "mul", "add"}
    assert all(row.rules for row in summary.rows)
    kernels = [row for row in summary.rows if row.path.endswith("['kernel']")]
    assert all(row.rules == ("dot",) for row in kernels)


def test_kernels_of_layers_are_stacked_matrices(llama):
    config, _, params, _ = llm.load(llama)
    kernel = params["layers"]["attention"]["key"]["kernel"]
    width = config.num_key_value_heads * config.head_width
    assert kernel.shape == (config.num_layers, config.width, width)


def test_a_saved_model_is_the_loaded_one(folder, tmp_path):
    model = llm.load(folder)
    llm.save(tmp_path / "saved", model)
    again = llm.load(tmp_path / "saved")
    assert again.config == model.config
    assert again.tokenizer.digest == model.tokenizer.digest
    params, others = flat(model.params), flat(again.params)
    assert params.keys() == others.keys()
    for path, array in params.items():
        np.testing.assert_array_equal(array, others[path], err_msg=path)


def test_bfloat16_survives_saving(folder, tmp_path):
    model = llm.load(folder, dtype=jnp.bfloat16)
    llm.save(tmp_path / "saved", model)
    again = llm.load(tmp_path / "saved", dtype=jnp.bfloat16)
    jax.tree.map(np.testing.assert_array_equal, model.params, again.params)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"


def test_transformers_loads_what_is_saved(folder, expected, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    llm.save(tmp_path / "saved", llm.load(folder))
    auto = transformers.AutoModelForCausalLM
    model, report = auto.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        logits = model(torch.from_numpy(expected["tokens"]).long()).logits.numpy()
    np.testing.assert_array_equal(logits, expected["logits"])


def test_transformers_loads_the_tokenizer_that_is_saved(llama, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = llm.load(llama)
    llm.save(tmp_path / "saved", model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    text = "in the 12. hen"
    assert tokenizer.encode(text) == model.tokenizer.encode(text)


def test_a_tokenizer_with_too_many_tokens_is_refused(llama):
    contents = json.loads((llama / "tokenizer.json").read_text())
    contents["model"]["vocab"]["new"] = 80
    (llama / "tokenizer.json").write_text(json.dumps(contents))
    with pytest.raises(ValueError, match=r"at most 80 tokens.* got 81"):
        llm.load(llama)


@pytest.mark.parametrize(
    ("path", "array", "message"),
    [
        (
            "kernel",
            np.zeros((2, 16, 4)),
            r"query/kernel .* \(2, 16, 16\).* 16, 4\)",
        ),
        ("adapter", np.zeros(3), r"query/adapter must .* shape None.* got \(3,\)"),
        ("kernel", None, r"query/kernel must have .* got None"),
    ],
)
def test_parameters_of_another_model_are_not_saved(
    llama, tmp_path, path, array, message
):
    model = llm.load(llama)
    query = model.params["layers"]["attention"]["query"]
    query.pop(path, None)
    if array is not None:
        query[path] = array
    with pytest.raises(ValueError, match=message):
        llm.save(tmp_path / "saved", model)
    assert not (tmp_path / "saved").exists()


def test_a_text_beyond_the_context_is_refused(folder):
    model = llm.load(folder)
    with pytest.raises(ValueError, match="at most 32 tokens; got 33"):
        model.apply(model.params, jnp.zeros(33, jnp.int32))


def test_a_missing_package_is_named(llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"tokenizers.*pip install '.\[llm\]'"
    ):
        pretrained.load(llama)
