"""A GGUF file is read as the model that it was made from."""

import json

import gguf
import numpy as np
import pytest
import safetensors.numpy

from examples import llm

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OTHERS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name):
    if name in OTHERS:
        return OTHERS[name]
    _, _, layer, *module, end = name.split(".")
    return f"blk.{layer}.{LAYER['.'.join(module)]}.{end}"


def in_pairs(array, num_heads):
    """The order of rows that llama.cpp's converter makes of queries and keys."""
    halves = array.reshape(num_heads, 2, -1, array.shape[1])
    return halves.swapaxes(1, 2).reshape(array.shape)


def arrays_of(folder):
    """The weights of a folder of Hugging Face, as a GGUF file has them."""
    heads = {"q_proj": 4, "k_proj": 2}
    arrays = safetensors.numpy.load_file(folder / "model.safetensors")
    for name, array in arrays.items():
        kind = name.split(".")[-2]
        if kind in heads:
            array = in_pairs(array, heads[kind])
        yield gguf_name(name), np.ascontiguousarray(array)


def settings_of(folder):
    config = json.loads((folder / "config.json").read_text())
    return {
        "llama.embedding_length": config["hidden_size"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": config["head_dim"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_parameters"]["rope_theta"],
    }


def write(path, folder, settings, *, quantized=None):
    """A GGUF file of a folder; without an array or a setting that is None."""
    writer = gguf.GGUFWriter(path, settings.pop("general.architecture", "llama"))
    for key, value in (settings_of(folder) | settings).items():
        add = {str: writer.add_string, list: writer.add_array, int: writer.add_uint32}
        if value is not None:
            add.get(type(value), writer.add_float32)(key, value)
    for name, array in arrays_of(folder):
        if quantized is not None and array.ndim == 2 and array.shape[1] % 32 == 0:
            array = gguf.quantize(array, quantized)
            writer.add_tensor(name, array, raw_dtype=quantized)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("model_name", ["llama", "llama_untied"], indirect=True)
def test_logits_equal_those_of_transformers(folder, expected, path, gguf_settings):
    model = llm.load(write(path, folder, gguf_settings))
    logits = model.apply(model.params, expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-4)


def test_it_is_the_model_of_the_folder(folder, path, gguf_settings, model_name):
    if model_name == "gpt2":
        pytest.skip("GGUF files of GPT-2 are not implemented")
    model = llm.load(write(path, folder, gguf_settings))
    assert model.config == llm.load(folder).config
