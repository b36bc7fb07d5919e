"""Tokenizers cut text as their files say."""

import json

import pytest

from examples.llm import tokenizer


def pieces(of, text):
    return [of.inner.id_to_token(i) for i in of.encode(text)]


def test_a_gguf_file_describes_where_text_is_cut(gguf_settings):
    smollm = tokenizer.from_gguf(gguf_settings)
    assert pieces(smollm, "in the 12") == ["in", "Ġthe", "Ġ", "1", "2"]
    gpt2 = tokenizer.from_gguf(gguf_settings | {"tokenizer.ggml.pre": "gpt-2"})
    assert pieces(gpt2, "in the 12") == ["in", "Ġthe", "Ġ", "12"]


def test_decoding_undoes_encoding(gguf_settings, llama):
    text = "the hen ate 12, then 4.5"
    for read in (tokenizer.from_gguf(gguf_settings), tokenizer.from_folder(llama)):
        assert read.decode(read.encode(text)) == text


def test_control_tokens_are_not_cut_and_not_text(gguf_settings):
    read = tokenizer.from_gguf(gguf_settings)
    assert pieces(read, "<s>he") == ["<s>", "he"]
    assert read.decode([1, *read.encode("he"), 2]) == "he"
    read = tokenizer.from_gguf(gguf_settings | {"tokenizer.ggml.add_bos_token": True})
    assert pieces(read, "in the") == ["<s>", "in", "Ġthe"]
    assert pieces(read, "<s>in the") == ["<s>", "in", "Ġthe"]  # as chats are rendered


def test_a_folder_neither_cuts_nor_pads_texts(llama):
    path = llama / "tokenizer.json"
    cut = {"max_length": 3, "strategy": "LongestFirst", "stride": 0}
    contents = json.loads(path.read_text())
    path.write_text(json.dumps(contents | {"truncation": cut | {"direction": "Right"}}))
    assert len(tokenizer.from_folder(llama).encode("a b c d e")) == 9


def test_a_saved_tokenizer_is_the_one_that_was_read(gguf_settings, tmp_path):
    read = tokenizer.from_gguf(gguf_settings)
    read.save(tmp_path)
    again = tokenizer.from_folder(tmp_path)
    assert again.settings == read.settings
    assert again.settings["eos_token"] == "</s>"
    assert again.digest == read.digest


def test_a_saved_tokenizer_names_no_path_of_a_machine(llama, tmp_path):
    settings = {"eos_token": "</s>", "name_or_path": "/home/someone/model"}
    (llama / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer.from_folder(llama).save(tmp_path)
    saved = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert saved == {"eos_token": "</s>"}


def test_the_digest_differs_between_tokenizers(gguf_settings):
    read = tokenizer.from_gguf(gguf_settings)
    tokens = list(gguf_settings["tokenizer.ggml.tokens"])
    tokens[4], tokens[5] = tokens[5], tokens[4]
    others = [{"tokenizer.ggml.tokens": tokens}, {"tokenizer.ggml.pre": "gpt-2"}]
    digests = [tokenizer.from_gguf(gguf_settings | other).digest for other in others]
    assert len({read.digest, *digests}) == 3
    assert read.digest == tokenizer.from_gguf(gguf_settings).digest


@pytest.mark.parametrize("contents", ["", "{}", json.dumps({"model": "none"})])
def test_a_missing_or_damaged_tokenizer_is_named(tmp_path, contents):
    with pytest.raises(FileNotFoundError, match=r"must have tokenizer\.json"):
        tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text(contents)
    with pytest.raises(ValueError, match=r"tokenizer\.json must be a tokenizer"):
        tokenizer.from_folder(tmp_path)
