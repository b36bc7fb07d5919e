"""The layout in which the library PEFT keeps adapters.

A directory has two files. `adapter_config.json` has the rank and the names of the
modules that are adapted. `adapter_model.safetensors` has two matrices for each module,
which are the transposed factors:

    base_model.model.MODULE.lora_A.weight   (rank, inputs)
    base_model.model.MODULE.lora_B.weight   (outputs, rank)

References:
  https://huggingface.co/docs/peft/main/en/developer_guides/checkpoint
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from dpmp import _validate
from dpmp.lora._adapters import Adapters, Axes, Factors, factor_shapes

ModuleName: TypeAlias = Callable[[str, int], str | None]
"""The name of the module that has a layer of an array, or None if there is none."""

# Other values of these entries stand for changes of another form.
_LORA_ONLY = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
}


def module_names(
    path: str, shape: Sequence[int], axes: Axes, names: ModuleName | None
) -> list[str]:
    """The names of the modules of a target, one for each matrix of its stack.

    Raises:
      ValueError: if `names` has none for one of them.
    """
    number = num_matrices(shape, axes)
    if names is None:
        plain = path.replace("/", ".")
        return [f"{plain}.{i}" for i in range(number)] if axes.stack else [plain]
    found = [names(path, layer) for layer in range(number)]
    _validate.require(
        None not in found,
        "every layer of a target must have a module name",
        target=path,
        names=found,
        fix="Leave `names` out, or adapt arrays that are modules of the other library.",
    )
    return [str(name) for name in found]


def num_matrices(shape: Sequence[int], axes: Axes) -> int:
    """The number of matrices that are stacked in an array."""
    return math.prod(shape[i] for i in axes.stack)


def array_names(module: str) -> tuple[str, str]:
    """The names of the two matrices of a module."""
    prefix = f"base_model.model.{module}"
    return f"{prefix}.lora_A.weight", f"{prefix}.lora_B.weight"


def to_arrays(factors: Factors, modules: Sequence[str]) -> dict[str, np.ndarray]:
    """The matrices of the modules of one target."""
    number = len(modules)
    a, b = (np.asarray(x, np.float32) for x in factors)
    rank = a.shape[-1]
    a, b = a.reshape(number, -1, rank), b.reshape(number, rank, -1)
    return {
        name: np.ascontiguousarray(matrix.T)
        for module, pair in zip(modules, zip(a, b, strict=True), strict=True)
        for name, matrix in zip(array_names(module), pair, strict=True)
    }


def from_arrays(
    arrays: Mapping[str, np.ndarray],
    modules: Sequence[str],
    shape: Sequence[int],
    axes: Axes,
    rank: int,
) -> Factors:
    """The factors of a target of some shape, from the matrices of its modules.

    Raises:
      ValueError: if a matrix is missing, or has another shape.
    """
    wanted = factor_shapes(shape, axes, rank)
    num_inputs = math.prod(shape[i] for i in axes.input)
    num_outputs = math.prod(shape[i] for i in axes.output)
    pairs = [
        (
            _matrix(arrays, array_names(module)[0], (rank, num_inputs)),
            _matrix(arrays, array_names(module)[1], (num_outputs, rank)),
        )
        for module in modules
    ]
    return Factors(
        *(
            jnp.asarray(np.stack([x.T for x in matrices]).reshape(to), jnp.float32)
            for matrices, to in zip(zip(*pairs, strict=True), wanted, strict=True)
        )
    )


def _matrix(
    arrays: Mapping[str, np.ndarray], name: str, shape: tuple[int, int]
) -> np.ndarray:
    _validate.require(
        name in arrays and arrays[name].shape == shape,
        "a file of adapters must have two matrices of matching shapes for each module",
        matrix=name,
        shape=arrays[name].shape if name in arrays else None,
        wanted=shape,
        fix="Load the adapters that were made for this model.",
    )
    return arrays[name]


def make_config(
    adapters: Adapters, modules: Sequence[str], more: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The content of `adapter_config.json`."""
    alpha = adapters.alpha
    return {
        **_LORA_ONLY,
        "r": adapters.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(modules),
        **(more or {}),
    }


def check_config(config: Any, file: str) -> tuple[int, float]:
    """Returns the rank and alpha; raises ValueError for changes of another form."""
    _validate.require(
        isinstance(config, dict) and {"r", "lora_alpha"} <= {*config},
        "the configuration of adapters must have entries for r and lora_alpha",
        file=file,
        fix="Load a directory that lora.save or PEFT has written.",
    )
    for name, value in _LORA_ONLY.items():
        given = config.get(name, value)
        _validate.require(
            given == value or (not given and not value),
            f"only adapters with {name}={value!r} can be loaded",
            file=file,
            **{name: given},
            fix="Train adapters of that kind, or merge these ones with PEFT.",
        )
    fix = "Load a directory that lora.save or PEFT has written."
    rank = _validate.positive_integer(r=config["r"], fix=fix)
    return rank, _validate.positive(lora_alpha=config["lora_alpha"], fix=fix)
