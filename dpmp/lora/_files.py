"""Saves adapters, and loads them for the model that they were trained on."""

import functools
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.lora import _peft
from dpmp.lora._adapters import (
    Adapters,
    Axes,
    check_finite,
    check_fits,
    check_targets,
    check_trained,
    last_two,
)
from dpmp.lora._fingerprint import fingerprint
from dpmp.lora._names import by_path
from dpmp.lora._quantised import type_of

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
        "base_model_name_or_path". Everyone who gets the file reads them, so give the
        public name of the model rather than a path.

    Raises:
      ValueError: if a factor did not move or is not finite, if the frozen parameters
        were changed, or if an entry of `config` stands for another kind of adapters;
        then nothing is written. Also if the files do not load as the same adapters.
        The message names the array.
      ModuleNotFoundError: if the package safetensors is not installed.
    """
    _validate.optional(functools.partial(_validate.function, "path", "layer"))(
        names=names
    )
    own = {"r", "lora_alpha", "target_modules", "peft_type"}
    if not isinstance(config, Mapping | None) or not own.isdisjoint(config or ()):
        _validate.fail(
            "config must be a dict of entries that dpmp does not write itself. Use "
            '{"base_model_name_or_path": "owner/model"}.',
            config=config,
        )
    if initial is None:
        check_fits(adapters, params, fingerprint(params))
        check_finite(adapters)
    else:
        check_trained(adapters, initial=initial, params=params)
    zero = [path for path, (_, b) in adapters.factors.items() if not np.any(b)]
    if zero:
        _validate.fail(
            "every adapter must change its target. Save the adapters after training.",
            zero=zero,
        )
    targets = by_path(params)
    shapes = {path: x.shape for path, x in targets.items()}
    places = {
        path: _peft.place_of(path, shapes[path], axes, names)
        for path, axes in adapters.axes
    }
    nameless = [path for path, place in places.items() if not place.modules]
    if nameless:
        _validate.fail(
            "every layer of a target must have a module name. Leave `names` out, or "
            "adapt arrays that are modules of the other library.",
            nameless=nameless,
        )
    parts = _peft.parts_of(places.values())
    layout = _peft.Layout(places, adapters.rank, parts)
    arrays = layout.to_arrays(adapters.factors)
    ours = {
        "base": adapters.base,
        "targets": {
            path: {"axes": axes, "modules": modules, "type": type_of(targets[path])}
            for path, (_, axes, modules) in places.items()
        },
        "alpha": adapters.alpha,
        "arrays": fingerprint(arrays),
    }
    metadata = {"format": "pt", "dpmp": json.dumps(ours)}
    content = _peft.make_config(adapters.rank, adapters.alpha, parts, config)
    _peft.check_config(content, parts, "config")
    try:
        text = json.dumps(content, indent=2)
    except (TypeError, ValueError):
        _validate.fail(
            "config must have values that JSON has. Use texts and numbers.",
            config=config,
        )
    folder = pathlib.Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / _ARRAYS, _safetensors().numpy.save(arrays, metadata))
    _write(folder / _CONFIG, text.encode())
    saved = load(folder, params)
    same = jax.tree.map(np.array_equal, adapters.factors, saved.factors)
    if saved.scale != adapters.scale or not all(jax.tree.leaves(same)):
        _validate.fail(
            "saved adapters must be the same when they are loaded. Save them in "
            "float32, as lora.init makes them.",
            directory=str(folder),
        )


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
    targets = by_path(params)
    shapes = {path: x.shape for path, x in targets.items()}
    places = _found(arrays, shapes, names) if ours is None else _noted(ours, shapes)
    parts = {} if ours is None else _peft.parts_of(places.values())
    rank, alpha = _peft.check_config(config, parts, str(folder / _CONFIG))
    factors = _peft.Layout(places, rank, parts).from_arrays(arrays)
    if ours is not None:
        present = {"arrays": fingerprint(arrays), "alpha": alpha}
        changed = [name for name, x in present.items() if ours[name] != x]
        if changed:
            _validate.fail(
                "adapters must be loaded as lora.save has written them. Load the "
                "original directory, or save the adapters again.",
                changed=changed,
            )
        _check_types(ours, targets)
    adapters = Adapters(
        factors=factors,
        axes=tuple((path, place.axes) for path, place in places.items()),
        rank=rank,
        alpha=alpha,
        base=base if ours is None else ours["base"],
    )
    check_fits(adapters, params, base)
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


def _noted(
    ours: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, _peft.Place]:
    """The targets of a file of `save`."""
    check_targets(ours["targets"], shapes)
    places = {}
    for path, target in ours["targets"].items():
        modules = [*map(_peft.as_module, target["modules"])]
        axes = Axes(*map(tuple, target["axes"]))
        places[path] = _peft.Place(shapes[path], axes, modules)
    return places


def _check_types(ours: Mapping[str, Any], targets: Mapping[str, Any]) -> None:
    for path, target in ours["targets"].items():
        given = type_of(targets[path])
        trained_on = target.get("type", given)  # older files do not have it
        if given != trained_on:
            _validate.fail(
                "adapters must be loaded for the base model in the dtype of training. "
                "Load the base model like that. To use the adapters in another dtype, "
                "then call adapters.for_base(params).",
                target=path,
                trained_on=trained_on,
                given=given,
            )


def _found(
    arrays: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    names: _peft.ModuleName | None,
) -> dict[str, _peft.Place]:
    """The targets of a file that another library has written."""
    if names is None:
        _validate.fail(
            "the module names of the model must be known for files of other "
            "libraries. Pass `names`, a function of the path of an array and a layer."
        )
    places = {}
    for path, shape in shapes.items():
        if len(shape) < 2:
            continue
        place = _peft.place_of(path, shape, last_two(len(shape)), names)
        if any(_peft.array_names(x.name)[0] in arrays for x in place.modules):
            places[path] = place
    return places


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ModuleNotFoundError:
        _validate.fail(
            "files of adapters need the package safetensors. Run pip install "
            "safetensors.",
            error=ModuleNotFoundError,
        )
    return safetensors
