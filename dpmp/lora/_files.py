"""Saves adapters, and loads them for the model that they were trained on."""

import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.lora import _checks, _peft
from dpmp.lora._adapters import (
    Adapters,
    Axes,
    check_adapters,
    check_base,
    check_shapes,
    check_targets,
    last_two,
)
from dpmp.lora._fingerprint import fingerprint
from dpmp.lora._names import by_path

_CONFIG, _ARRAYS = "adapter_config.json", "adapter_model.safetensors"


def save(
    directory: str | os.PathLike[str],
    adapters: Adapters,
    params: PyTree,
    *,
    initial: Adapters | None,
    names: _peft.ModuleName | None = None,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Saves trained adapters in PEFT's layout, and checks that they load unchanged.

    >>> save("adapter", state.params, params, initial=adapters)  # doctest: +SKIP

    Args:
      directory: where to save. It is made if it does not exist.
      adapters: the adapters after training.
      params: the frozen parameters, after training.
      initial: the adapters before training, to check that every factor has moved. None
        skips this check, for adapters that were loaded.
      names: a function `names(path, layer)` that returns the module name for a layer of
        a target, by which other libraries find their modules. For a model of Hugging
        Face, ("layers/query/kernel", 3) may give "model.layers.3.self_attn.q_proj". If
        a module holds several arrays side by side along its outputs, it returns
        (name, part, number of parts), for example ("h.3.attn.c_attn", 0, 3) for the
        queries of GPT-2. By default, the name is the path and, for a stack, the number
        of the layer.
      config: more entries of the file `adapter_config.json`, such as "task_type" and
        "base_model_name_or_path".

    Raises:
      ValueError: if a factor did not move or is not finite, if the frozen parameters
        were changed, or if the files do not load as the same adapters. The message
        names the array.
      ModuleNotFoundError: if the package safetensors is not installed.
    """
    _check_before(adapters, params, initial)
    shapes = {path: x.shape for path, x in by_path(params).items()}
    axes = dict(adapters.axes)
    modules = {
        path: _peft.modules_of(path, shapes[path], axes[path], names) for path in axes
    }
    parts = _peft.parts_of(modules)
    layout = _peft.Layout(modules, axes, shapes, adapters.rank, parts)
    arrays = _peft.to_arrays(layout, adapters.factors)
    ours = {
        "base": adapters.base,
        "targets": {
            path: {"axes": axes[path], "modules": modules[path]} for path in axes
        },
        "alpha": adapters.alpha,
        "arrays": fingerprint(arrays),
    }
    metadata = {"format": "pt", "dpmp": json.dumps(ours)}
    folder = pathlib.Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / _ARRAYS, _safetensors().numpy.save(arrays, metadata))
    content = _peft.make_config(adapters, parts, config)
    _write(folder / _CONFIG, json.dumps(content, indent=2).encode())
    saved = load(folder, params)
    same = jax.tree.map(np.array_equal, adapters.factors, saved.factors)
    _validate.require(
        saved.scale == adapters.scale and all(jax.tree.leaves(same)),
        "saved adapters must be the same when they are loaded. Save them in float32, "
        "as lora.init makes them.",
        directory=str(folder),
    )


def _check_before(adapters: Adapters, params: PyTree, initial: Adapters | None) -> None:
    check_adapters(adapters)
    if initial is not None:
        _checks.check_trained(adapters, initial=initial, params=params)
    _checks.check_finite(adapters)
    zero = [path for path, (_, b) in adapters.factors.items() if not np.any(b)]
    _validate.require(
        not zero,
        "every adapter must change its target. Save the adapters after training.",
        zero=zero,
    )
    check_base(adapters, fingerprint(params))
    check_shapes(adapters, params)


def _write(file: pathlib.Path, data: bytes) -> None:
    """Writes a file completely or not at all."""
    unfinished = file.with_name(f"{file.name}.unfinished")
    unfinished.write_bytes(data)
    unfinished.replace(file)


def load(
    directory: str | os.PathLike[str],
    params: PyTree,
    *,
    names: _peft.ModuleName | None = None,
) -> Adapters:
    """Loads adapters for a model.

    Args:
      directory: a directory that was written by `save` or by PEFT.
      params: the frozen parameters.
      names: a function that returns module names; see `save`. It is needed only for
        files of other libraries, in which the last two axes of a target are its inputs
        and outputs.

    Raises:
      ValueError: if a file is missing or damaged, if the adapters do not fit the
        parameters, or if they are not LoRA. For files of `save`, also if a file was
        edited, or if the adapters were trained on other parameters.
      ModuleNotFoundError: if the package safetensors is not installed.
    """
    folder, base = pathlib.Path(directory), fingerprint(params)
    config = _read(folder / _CONFIG, lambda file: json.loads(file.read_text()))
    arrays, ours = _read(folder / _ARRAYS, _read_arrays)
    shapes = {path: x.shape for path, x in by_path(params).items()}
    axes, modules = _from_ours(ours) if ours else _found(arrays, shapes, names)
    parts = _peft.parts_of(modules) if ours else {}
    rank, alpha = _peft.check_config(config, parts, str(folder / _CONFIG))
    check_targets([*axes], shapes)
    layout = _peft.Layout(modules, axes, shapes, rank, parts)
    factors = _peft.from_arrays(layout, arrays)
    if ours:
        _check_unchanged(ours, arrays, alpha)
    adapters = Adapters(
        factors=factors,
        axes=tuple(axes.items()),
        rank=rank,
        alpha=alpha,
        base=ours["base"] if ours else base,
    )
    check_base(adapters, base)
    return adapters


def _read(file: pathlib.Path, read: Callable[[pathlib.Path], Any]) -> Any:
    try:
        return read(file)
    except (OSError, ValueError, KeyError, _safetensors().SafetensorError) as error:
        _validate.fail(
            "a directory of adapters must have two readable files. Load one that "
            "lora.save or PEFT has written.",
            file=str(file),
            reason=str(error) or type(error).__name__,
        )


def _read_arrays(
    file: pathlib.Path,
) -> tuple[dict[str, np.ndarray], dict[str, Any] | None]:
    """The arrays of a file, and the metadata of `save`, or None."""
    with _safetensors().safe_open(file, framework="numpy") as opened:
        names = opened.keys()
        arrays = {name: opened.get_tensor(name) for name in names}
        metadata = opened.metadata() or {}
    return arrays, json.loads(metadata["dpmp"]) if "dpmp" in metadata else None


def _from_ours(ours: dict[str, Any]) -> tuple[dict[str, Axes], _peft.Modules]:
    targets = ours["targets"].items()
    axes = {path: Axes(*map(tuple, target["axes"])) for path, target in targets}
    modules = {
        path: [*map(_peft.as_module, target["modules"])] for path, target in targets
    }
    return axes, modules


def _found(
    arrays: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    names: _peft.ModuleName | None,
) -> tuple[dict[str, Axes], _peft.Modules]:
    """Finds the targets of a file that another library has written."""
    if names is None:
        _validate.fail(
            "the module names of the model must be known for files of other libraries. "
            "Pass `names`, a function of the path of an array and a layer."
        )
    modules = {}
    for path, shape in shapes.items():
        if len(shape) < 2:
            continue
        number = _peft.num_matrices(shape, last_two(len(shape)))
        found = [names(path, layer) for layer in range(number)]
        of_path = [_peft.as_module(x) for x in found if x is not None]
        is_here = any(_peft.array_names(x.name)[0] in arrays for x in of_path)
        if is_here and len(of_path) == number:
            modules[path] = of_path
    return {path: last_two(len(shapes[path])) for path in modules}, modules


def _check_unchanged(
    ours: Mapping[str, Any], arrays: Mapping[str, np.ndarray], alpha: float
) -> None:
    """Raises ValueError if a file was changed after `save` has written it."""
    changed = {
        "arrays": ours["arrays"] != fingerprint(arrays),
        "alpha": ours["alpha"] != alpha,
    }
    _validate.require(
        not any(changed.values()),
        "adapters must be loaded as lora.save has written them. Load the original "
        "directory, or save the adapters again.",
        changed=[name for name, is_changed in changed.items() if is_changed],
    )


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ModuleNotFoundError:
        _validate.fail(
            "files of adapters need the package safetensors. Run pip install "
            "'dpmp[lora]'.",
            error=ModuleNotFoundError,
        )
    return safetensors
