"""Makes the small models that the tests of `examples/llm` compare with transformers.

    pip install -e '.[llm-fixtures]'
    python tests/examples/llm/make_fixtures.py

Each folder of `fixtures` gets a model with random parameters, as
transformers saves it, and the outputs that transformers computes with PyTorch, in
float32. It takes ten seconds.
"""

import pathlib
import shutil
from typing import Any

import numpy as np
import torch
import transformers

FOLDER = pathlib.Path(__file__).with_name("fixtures")

_BERT: dict[str, Any] = {
    "vocab_size": 80,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
_LLAMA: dict[str, Any] = {
    **_BERT,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
}
_GPT2: dict[str, Any] = {
    "vocab_size": 80,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def configurations() -> dict[str, transformers.PretrainedConfig]:
    """The models by name."""
    return {
        "llama": transformers.LlamaConfig(**_LLAMA, tie_word_embeddings=True),
        "llama_untied": transformers.LlamaConfig(**_LLAMA, head_dim=6),
        "gpt2": transformers.GPT2Config(**_GPT2),
        "bert": transformers.BertConfig(**_BERT),
    }


def randomise(model: torch.nn.Module) -> None:
    """Makes every parameter matter: scales and biases are not ones and zeros."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_scale = parameter.ndim == 1 and name.endswith("weight")
            parameter.normal_(1.0 if is_scale else 0.0, 0.3)


def outputs(model: torch.nn.Module, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """What the model computes; for a BERT, of texts with padding."""
    inputs = {"input_ids": torch.from_numpy(tokens)}
    if model.config.model_type != "bert":
        return {"logits": model(**inputs).logits.numpy()}
    is_token = np.arange(tokens.shape[1]) < np.array([[13], [7]])
    found = model(**inputs, attention_mask=torch.from_numpy(is_token).long())
    return {
        "is_token": is_token,
        "vectors": found.last_hidden_state.numpy(),
        "pooled": found.pooler_output.numpy(),
    }


def main() -> None:
    """Writes all folders anew."""
    for name, config in configurations().items():
        torch.manual_seed(0)
        kind = "AutoModel" if name == "bert" else "AutoModelForCausalLM"
        model = getattr(transformers, kind).from_config(config).eval()
        randomise(model)
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        model.save_pretrained(FOLDER / name)
        (FOLDER / name / "generation_config.json").unlink(missing_ok=True)
        tokens = np.random.default_rng(0).integers(config.vocab_size, size=(2, 13))
        with torch.no_grad():
            expected = outputs(model, tokens)
        expected["tokens"] = tokens.astype(np.int32)
        np.savez_compressed(FOLDER / name / "expected", allow_pickle=False, **expected)
        print(name, {key: float(np.abs(x).max()) for key, x in expected.items()})


if __name__ == "__main__":
    main()
