"""Small models that transformers made, and a tokenizer for them."""

import json
import pathlib
import shutil

import numpy as np
import pytest

import dpmp

FIXTURES = pathlib.Path(__file__).parent / "fixtures"

TOKENS = ["<|endoftext|>", "<s>", "</s>", "Ġ"]
TOKENS += "abcdefghijklmnopqrstuvwxyz0123456789.,"
MERGES = ["h e", "Ġ t", "Ġt he", "i n", "1 2"]
TOKENS += [merge.replace(" ", "") for merge in MERGES]


@pytest.fixture(params=["llama", "llama_untied", "gpt2"])
def model_name(request):
    return request.param


@pytest.fixture
def expected(model_name):
    """Tokens, and what transformers computes for them."""
    with np.load(FIXTURES / model_name / "expected.npz") as file:
        return dict(file)


@pytest.fixture
def folder(model_name, tmp_path):
    return copy_of(model_name, tmp_path / "model")


@pytest.fixture
def llama(tmp_path):
    return copy_of("llama", tmp_path / "llama")


@pytest.fixture
def gguf_settings():
    """What a GGUF file says about a small tokenizer."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(TOKENS) - 3),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@pytest.fixture
def check_rules():
    """Checks that book-keeping has a rule for every parameter of a loss."""

    def check(loss, params, batch):
        summary = dpmp.book_keeping.summarize(loss, params, batch)
        for row in summary.rows:
            is_kernel = row.path.endswith("['kernel']")
            allowed = {"dot"} if is_kernel else {"dot", "gather", "mul", "add"}
            assert row.rules
            assert {*row.rules} <= allowed

    return check


def copy_of(name, folder):
    """A folder with a model and a tokenizer, which a test may change."""
    shutil.copytree(FIXTURES / name, folder)
    ranks = {token: i for i, token in enumerate(TOKENS)}
    model = {"type": "BPE", "vocab": ranks, "merges": MERGES}
    pre = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    contents = {"version": "1.0", "model": model, "pre_tokenizer": pre, "decoder": pre}
    (folder / "tokenizer.json").write_text(json.dumps(contents))
    return folder
