"""Folders in the layout of Hugging Face: `config.json`, `model.safetensors`.

Large models come in several files of weights, called shards. The file
`model.safetensors.index.json` then says which array is in which of them.
"""

import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from . import _config
from ._config import Config
from ._names import Names, read_params, write_params
from ._packages import need

_LAYER = "model.layers.{}."
_H = "transformer.h.{}."

NAMES = {
    "llama": Names(
        {
            "embed/embedding": "model.embed_tokens.weight",
            "layers/attention_norm/scale": _LAYER + "input_layernorm.weight",
            "layers/attention/query/kernel": _LAYER + "self_attn.q_proj.weight",
            "layers/attention/key/kernel": _LAYER + "self_attn.k_proj.weight",
            "layers/attention/value/kernel": _LAYER + "self_attn.v_proj.weight",
            "layers/attention/out/kernel": _LAYER + "self_attn.o_proj.weight",
            "layers/feed_forward_norm/scale": _LAYER
            + "post_attention_layernorm.weight",
            "layers/feed_forward/gate/kernel": _LAYER + "mlp.gate_proj.weight",
            "layers/feed_forward/up/kernel": _LAYER + "mlp.up_proj.weight",
            "layers/feed_forward/down/kernel": _LAYER + "mlp.down_proj.weight",
            "norm/scale": "model.norm.weight",
            "head/kernel": "lm_head.weight",
        },
        outputs_first=True,
        ignored=("rotary_emb.inv_freq", "lm_head.weight"),
    ),
    "gpt2": Names(
        {
            "embed/embedding": "transformer.wte.weight",
            "position/embedding": "transformer.wpe.weight",
            "layers/attention_norm/scale": _H + "ln_1.weight",
            "layers/attention_norm/bias": _H + "ln_1.bias",
            "layers/attention/query/kernel": _H + "attn.c_attn.weight",
            "layers/attention/key/kernel": _H + "attn.c_attn.weight",
            "layers/attention/value/kernel": _H + "attn.c_attn.weight",
            "layers/attention/query/bias": _H + "attn.c_attn.bias",
            "layers/attention/key/bias": _H + "attn.c_attn.bias",
            "layers/attention/value/bias": _H + "attn.c_attn.bias",
            "layers/attention/out/kernel": _H + "attn.c_proj.weight",
            "layers/attention/out/bias": _H + "attn.c_proj.bias",
            "layers/feed_forward_norm/scale": _H + "ln_2.weight",
            "layers/feed_forward_norm/bias": _H + "ln_2.bias",
            "layers/feed_forward/up/kernel": _H + "mlp.c_fc.weight",
            "layers/feed_forward/up/bias": _H + "mlp.c_fc.bias",
            "layers/feed_forward/down/kernel": _H + "mlp.c_proj.weight",
            "layers/feed_forward/down/bias": _H + "mlp.c_proj.bias",
            "norm/scale": "transformer.ln_f.weight",
            "norm/bias": "transformer.ln_f.bias",
            "head/kernel": "lm_head.weight",
        },
        outputs_first=False,
        ignored=("attn.bias", "attn.masked_bias", "lm_head.weight"),
    ),
}


def huggingface_name(path: str, layer: int, architecture: str = "llama") -> str:
    """The module of transformers that has the kernel at `path` in one layer.

    >>> huggingface_name("layers/attention/query/kernel", 3)
    'model.layers.3.self_attn.q_proj'
    """
    names = NAMES[architecture]
    if path not in names.table:
        raise ValueError(
            f"path must be one of a {architecture}; got {path!r}. The paths are "
            f"{', '.join(names.table)}."
        )
    if len(names.parts(path)) > 1:
        raise ValueError(
            f"{path} must have a module of its own in transformers; got "
            f"{names.table[path]}, which it shares with others. Name the shared module."
        )
    return names.table[path].format(layer).rpartition(".")[0]


# ---------------------------------------------------------------------- reading


def read_config(folder: pathlib.Path) -> Config:
    """Reads `config.json`."""
    return _config.from_huggingface(_read_json(folder / "config.json"))


def read_weights(folder: pathlib.Path, config: Config, shapes: Any) -> dict[str, Any]:
    """Reads the weights into NumPy arrays, in a nested dict like `shapes`."""
    names = NAMES[config.architecture]
    return read_params(shapes, names, _Weights(folder))


def _read_json(path: pathlib.Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"A folder of a model must have {path.name}; got {path.parent}, which has "
            "none. Give the folder with config.json, model.safetensors and "
            "tokenizer.json."
        ) from None
    except ValueError as error:
        raise ValueError(
            f"{path} must be JSON; got {error}. Is the file complete?"
        ) from None


class _Weights(Mapping[str, np.ndarray]):
    """The arrays in the files of weights, read when they are asked for."""

    def __init__(self, folder: pathlib.Path):
        index = folder / "model.safetensors.index.json"
        shards = ["model.safetensors"]
        if not (folder / shards[0]).exists() and index.exists():
            shards = sorted(set(_read_json(index)["weight_map"].values()))
        opened = [_open(folder / shard) for shard in shards]
        names = [file.keys() for file in opened]  # one cannot loop over a file itself
        self._files = {
            name: file
            for file, of_file in zip(opened, names, strict=True)
            for name in of_file
        }

    def __getitem__(self, name: str) -> np.ndarray:
        return self._files[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _open(path: pathlib.Path) -> Any:
    safetensors = need("safetensors")
    try:
        return safetensors.safe_open(path, framework="numpy")
    except FileNotFoundError:
        raise FileNotFoundError(
            f"The weights must be in {path.name}; {path.parent} has no such file. "
            "Download the folder again, or convert older formats to safetensors."
        ) from None
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{path} must be a file of safetensors; got {error}. Is it complete?"
        ) from None


# ---------------------------------------------------------------------- writing


def write(
    folder: pathlib.Path, config: Config, params: Any, *, shard_bytes: int = 5 * 10**9
) -> None:
    """Writes `config.json` and the weights, in shards of at most `shard_bytes`."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = dict(write_params(params, NAMES[config.architecture]))
    dtypes = {str(array.dtype) for array in arrays.values()}
    settings = _config.to_huggingface(config)
    settings["torch_dtype"] = dtypes.pop() if len(dtypes) == 1 else "float32"
    _write_json(folder / "config.json", settings)
    _write_weights(folder, _in_shards(arrays, shard_bytes))


def _write_json(path: pathlib.Path, contents: Any) -> None:
    path.write_text(json.dumps(contents, indent=2) + "\n", "utf-8")


def _in_shards(arrays: dict[str, np.ndarray], shard_bytes: int) -> list[dict[str, Any]]:
    shards, size = [{}], 0
    for name, array in arrays.items():
        size += array.nbytes
        if size > shard_bytes and shards[-1]:
            shards.append({})
            size = array.nbytes
        shards[-1][name] = array
    return shards


def _write_weights(folder: pathlib.Path, shards: list[dict[str, Any]]) -> None:
    save_file = need("safetensors.numpy").save_file
    files = ["model.safetensors"]
    for old in folder.glob("model*.safetensors*"):  # other shards of an earlier model
        old.unlink()
    if len(shards) > 1:
        files = [
            f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
            for i in range(len(shards))
        ]
        total = sum(array.nbytes for shard in shards for array in shard.values())
        places = {x: file for file, s in zip(files, shards, strict=True) for x in s}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        _write_json(folder / "model.safetensors.index.json", index)
    for file, shard in zip(files, shards, strict=True):
        # transformers refuses files that do not say which library they are for.
        save_file(shard, folder / file, metadata={"format": "pt"})
