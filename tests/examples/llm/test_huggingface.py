"""Folders are read and written as they are, and errors name what is wrong."""

import json

import numpy as np
import pytest
import safetensors.numpy

from examples.llm import huggingface, huggingface_name, pretrained


def read(folder):
    config = huggingface.read_config(folder)
    _, shapes = pretrained.define(config)
    return config, huggingface.read_weights(folder, config, shapes)


def arrays_of(folder):
    files = folder.glob("*.safetensors")
    parts = map(safetensors.numpy.load_file, files)
    return {name: x for part in parts for name, x in part.items()}


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder, change):
    arrays = arrays_of(folder)
    change(arrays)
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")


@pytest.mark.parametrize("shard_bytes", [10**9, 4000, 1])
def test_written_weights_have_the_bits_of_those_read(folder, tmp_path, shard_bytes):
    config, params = read(folder)
    huggingface.write(tmp_path / "new", config, params, shard_bytes=shard_bytes)
    before, after = arrays_of(folder), arrays_of(tmp_path / "new")
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(array, after[name], err_msg=name)
        assert array.dtype == after[name].dtype
    assert read(tmp_path / "new")[0] == config


def test_shards_are_small_and_are_read_back(llama, tmp_path):
    config, params = read(llama)
    huggingface.write(tmp_path / "new", config, params, shard_bytes=6000)
    shards = sorted((tmp_path / "new").glob("model-*.safetensors"))
    assert len(shards) > 2
    assert not (tmp_path / "new" / "model.safetensors").exists()
    for shard in shards:
        arrays = safetensors.numpy.load_file(shard).values()
        assert sum(x.nbytes for x in arrays) <= 6000
    again = read(tmp_path / "new")[1]
    np.testing.assert_array_equal(
        params["embed"]["embedding"], again["embed"]["embedding"]
    )


def test_writing_removes_the_shards_of_an_earlier_model(llama, tmp_path):
    config, params = read(llama)
    huggingface.write(tmp_path / "new", config, params, shard_bytes=6000)
    huggingface.write(tmp_path / "new", config, params)
    files = {path.name for path in (tmp_path / "new").iterdir()}
    assert files == {"config.json", "model.safetensors"}


def test_weights_may_be_read_by_those_who_may_read_the_config(llama, tmp_path):
    config, params = read(llama)
    huggingface.write(tmp_path / "new", config, params, shard_bytes=6000)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()}
    assert modes == {(tmp_path / "new" / "config.json").stat().st_mode & 0o777}


def test_a_prefix_of_the_whole_model_may_be_missing(llama):
    _, params = read(llama)

    def shorten(arrays):
        for name in list(arrays):
            arrays[name.removeprefix("model.")] = arrays.pop(name)

    change_weights(llama, shorten)
    np.testing.assert_array_equal(
        read(llama)[1]["norm"]["scale"], params["norm"]["scale"]
    )


def test_the_forms_of_older_versions_of_transformers_are_read(llama):
    config, _ = read(llama)
    settings = json.loads((llama / "config.json").read_text())
    del settings["rope_parameters"], settings["head_dim"]
    settings |= {"rope_theta": 500.0, "rope_scaling": None}
    (llama / "config.json").write_text(json.dumps(settings))
    assert read(llama)[0] == config


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "must have config.json; got .*llama"),
        ("model.safetensors", "must be in model.safetensors; .*llama has no"),
    ],
)
def test_a_missing_file_is_named(llama, missing, message):
    (llama / missing).unlink()
    with pytest.raises(FileNotFoundError, match=message):
        read(llama)


def test_a_missing_shard_is_named(llama, tmp_path):
    config, params = read(llama)
    huggingface.write(tmp_path / "new", config, params, shard_bytes=6000)
    shard = sorted((tmp_path / "new").glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=shard.name):
        read(tmp_path / "new")


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_damaged_file_is_named(llama, file):
    path = llama / file
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=f"{file} must be .*complete"):
        read(llama)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "llama, gpt2, bert; got 'mamba'"),
        ({"model_type": None}, "llama, gpt2, bert; got None"),
        ({"hidden_act": "relu"}, "hidden_act .* must be 'silu'; got 'relu'"),
        ({"attention_bias": True}, "attention_bias .* must be False; got True"),
        (
            {"rope_parameters": {"rope_type": "llama3"}},
            "rope_type .* must be \"default\"; got 'llama3'",
        ),
        ({"hidden_size": None}, "must state hidden_size"),
        ({"num_hidden_layers": "two"}, "num_layers must be an integer .* got 'two'"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads; got 4 and 3"),
        ({"head_dim": 5}, "head_width must be even.* got 5"),
        ({"vocab_size": 81}, r"embed_tokens.weight .* \(81, 16\).* got \(80, 16\)"),
        (
            {"intermediate_size": 20},
            r"0.mlp.down_proj.weight must have the shape \(16, 20\).* \(16, 24\)",
        ),
        ({"num_hidden_layers": 3}, "array 'model.layers.2.self_attn.k_proj.weight'"),
        ({"num_hidden_layers": 1}, r"got none for model.layers.1.* \(9 in all\)"),
        ({"tie_word_embeddings": False}, "array 'lm_head.weight'; got none"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(llama, changes, message):
    change_config(llama, **changes)
    with pytest.raises(ValueError, match=message):
        read(llama)


def test_an_array_that_has_no_place_is_named(llama):
    change_weights(llama, lambda x: x.update({"adapter.weight": np.zeros(3)}))
    with pytest.raises(ValueError, match=r"got none for adapter\.weight"):
        read(llama)


def test_arrays_that_are_no_parameters_are_left_out(llama):
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_weights(llama, lambda x: x.update({buffer: np.zeros(3)}))
    read(llama)


def test_the_module_of_transformers_is_named():
    name = huggingface_name("layers/attention/query/kernel", 3)
    assert name == "model.layers.3.self_attn.q_proj"
    name = huggingface_name("layers/feed_forward/up/kernel", 0, architecture="gpt2")
    assert name == "transformer.h.0.mlp.c_fc"


def test_kernels_of_one_module_are_its_parts():
    parts = [
        huggingface_name(f"layers/attention/{name}/kernel", 3, "gpt2")
        for name in ("query", "key", "value")
    ]
    assert parts == [("transformer.h.3.attn.c_attn", i, 3) for i in range(3)]


def test_arrays_that_are_no_kernels_have_no_module():
    for path in ("embed/embedding", "layers/attention/query/bias", "norm/scale"):
        assert huggingface_name(path, 0, "gpt2") is None


def test_the_name_of_an_unknown_path_is_refused():
    with pytest.raises(
        ValueError, match="must be one of a llama; got 'layers/nowhere'"
    ):
        huggingface_name("layers/nowhere", 0)
