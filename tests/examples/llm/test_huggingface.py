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


def test_written_weights_have_the_bits_of_those_read(folder, tmp_path):
    config, params = read(folder)
    huggingface.write(tmp_path / "new", config, params, shard_bytes=4000)
    before, after = arrays_of(folder), arrays_of(tmp_path / "new")
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(array, after[name], err_msg=name)
        assert array.dtype == after[name].dtype
    assert read(tmp_path / "new")[0] == config


def test_shards_are_small_and_replace_those_of_an_earlier_model(llama, tmp_path):
    (config, params), folder = read(llama), tmp_path / "new"
    huggingface.write(folder, config, params, shard_bytes=6000)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert not (folder / "model.safetensors").exists()
    for shard in shards:
        arrays = safetensors.numpy.load_file(shard).values()
        assert sum(x.nbytes for x in arrays) <= 6000
    # Weights may be read by those who may read the config.
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    shards[1].unlink()
    with pytest.raises(FileNotFoundError, match=shards[1].name):
        read(folder)
    huggingface.write(folder, config, params)
    files = {path.name for path in folder.iterdir()}
    assert files == {"config.json", "model.safetensors"}


def test_a_prefix_and_other_arrays_are_as_they_may_be(llama):
    _, params = read(llama)

    def change(arrays):
        for name in list(arrays):
            arrays[name.removeprefix("model.")] = arrays.pop(name)
        arrays["layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(3)

    change_weights(llama, change)
    scale = read(llama)[1]["norm"]["scale"]
    np.testing.assert_array_equal(scale, params["norm"]["scale"])
    change_weights(llama, lambda x: x.update({"adapter.weight": np.zeros(3)}))
    with pytest.raises(ValueError, match=r"got none for adapter\.weight"):
        read(llama)


def test_the_forms_of_older_versions_of_transformers_are_read(llama):
    config, _ = read(llama)
    settings = json.loads((llama / "config.json").read_text())
    del settings["rope_parameters"], settings["head_dim"]
    settings |= {"rope_theta": 500.0, "rope_scaling": None}
    (llama / "config.json").write_text(json.dumps(settings))
    assert read(llama)[0] == config


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_damaged_or_missing_file_is_named(llama, file):
    path = llama / file
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=f"{file} must be .*complete"):
        read(llama)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=f"must .*{file}; .*llama"):
        read(llama)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "llama, gpt2, bert; got 'mamba'"),
        ({"hidden_act": "relu"}, "hidden_act .* must be 'silu'; got 'relu'"),
        ({"attention_bias": True}, "attention_bias .* must be False; got True"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "must be .default.; got 'yarn'"),
        ({"hidden_size": None}, "must state hidden_size"),
        ({"num_hidden_layers": "two"}, "num_layers must be an integer .* got 'two'"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads; got 4 and 3"),
        ({"head_dim": 5}, "head_width must be even.* got 5"),
        ({"vocab_size": 81}, r"embed_tokens.weight .* \(81, 16\).* got \(80, 16\)"),
        ({"intermediate_size": 20}, r"0.mlp.down_proj.weight .*\(16, 20\).*\(16, 24\)"),
        ({"num_hidden_layers": 3}, "array 'model.layers.2.self_attn.k_proj.weight'"),
        ({"num_hidden_layers": 1}, r"got none for model.layers.1.* \(9 in all\)"),
        ({"tie_word_embeddings": False}, "array 'lm_head.weight'; got none"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(llama, changes, message):
    change_config(llama, **changes)
    with pytest.raises(ValueError, match=message):
        read(llama)


def test_the_module_of_transformers_is_named():
    for path, architecture, name in (
        ("layers/attention/query/kernel", "llama", "model.layers.3.self_attn.q_proj"),
        ("layers/feed_forward/up/kernel", "gpt2", "transformer.h.3.mlp.c_fc"),
        # One of the parts of a module.
        ("layers/attention/key/kernel", "gpt2", ("transformer.h.3.attn.c_attn", 1, 3)),
        # Arrays that are no kernels have no module.
        ("embed/embedding", "gpt2", None),
        ("layers/attention/query/bias", "gpt2", None),
    ):
        assert huggingface_name(path, 3, architecture) == name
    with pytest.raises(ValueError, match="must be one of a gpt2; got 'lay"):
        huggingface_name("layers/nowhere", 0, "gpt2")
