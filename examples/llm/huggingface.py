"""Folders in the layout of Hugging Face: `config.json`, `model.safetensors`.

Large models come in several files of weights, called shards. The file
`model.safetensors.index.json` then says which array is in which of them.
"""

import json
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from . import _config
from ._config import Config
from ._huggingface_names import NAMES
from ._names import read_params, write_params
from ._packages import need

# ---------------------------------------------------------------------- reading


def read_config(folder: pathlib.Path) -> Config:
    """Reads `config.json`."""
    return _config.from_huggingface(_read_json(folder / "config.json"))


def read_weights(
    folder: pathlib.Path, config: Config, shapes: Any, *convert: Any
) -> dict[str, Any]:
    """Reads the weights in a nested dict like `shapes`; see `read_params`."""
    names = NAMES[config.architecture]
    return read_params(shapes, names, _Weights(folder), *convert)


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
        # safetensors makes files that only their owner may read, whatever the umask.
        shutil.copymode(folder / "config.json", folder / file)
