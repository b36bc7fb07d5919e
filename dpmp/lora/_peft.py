"""The layout in which the library PEFT keeps adapters.

A directory has two files. `adapter_config.json` has the rank and the names of the
modules that are adapted. `adapter_model.safetensors` has two matrices for each module,
which are the transposed factors:

    base_model.model.MODULE.lora_A.weight   (rank, inputs)
    base_model.model.MODULE.lora_B.weight   (outputs, rank)

A module may hold several targets side by side, as the module c_attn of GPT-2 holds the
kernels of queries, keys and values. Its outputs are then divided into equal parts. The
factors of k targets are written as one change of rank k times as large: lora_A has one
factor below the other, and lora_B has blocks on its diagonal.

References:
  https://huggingface.co/docs/peft/main/en/developer_guides/checkpoint
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from dpmp import _validate
from dpmp.lora._adapters import Adapters, Axes, Factors, factor_shapes

ModuleName: TypeAlias = Callable[[str, int], str | tuple[str, int, int] | None]
"""The name of the module that has a layer of an array, or None if there is none.

If the array is part 0, 1, ... of n equal parts of the outputs of the module, the result
is (name, part, n).
"""


class Module(NamedTuple):
    """A module, or one of the equal parts into which its outputs are divided."""

    name: str
    part: int = 0
    num_parts: int = 1


Modules: TypeAlias = Mapping[str, Sequence[Module]]  # of each target
Parts: TypeAlias = Mapping[str, Sequence[int]]  # those that are targets, by module

# Other values of these entries stand for changes of another form.
_LORA_ONLY = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "modules_to_save": None,
}


def modules_of(
    path: str, shape: Sequence[int], axes: Axes, names: ModuleName | None
) -> list[Module]:
    """The modules of a target, one for each matrix of its stack.

    Raises:
      ValueError: if `names` has none for one of them.
    """
    number = num_matrices(shape, axes)
    if names is None:
        plain = path.replace("/", ".")
        found = [f"{plain}.{i}" for i in range(number)] if axes.stack else [plain]
    else:
        found = [names(path, layer) for layer in range(number)]
    _validate.require(
        None not in found,
        "every layer of a target must have a module name",
        target=path,
        names=found,
        fix="Leave `names` out, or adapt arrays that are modules of the other library.",
    )
    return [as_module(x) for x in found if x is not None]


def as_module(name: str | Sequence[Any]) -> Module:
    """A module from what `names` returns for it."""
    return Module(name) if isinstance(name, str) else Module(*name)


def parts_of(modules: Modules) -> dict[str, list[int]]:
    """The parts of each module that are targets, in order.

    Raises:
      ValueError: if two targets are the same part of a module, or if a module has not
        the part that it should have.
    """
    parts: dict[str, list[int]] = {}
    num_parts: dict[str, int] = {}
    for module in (x for of_path in modules.values() for x in of_path):
        parts.setdefault(module.name, []).append(module.part)
        number = num_parts.setdefault(module.name, module.num_parts)
        _validate.require(
            0 <= module.part < module.num_parts == number,
            "the parts of a module must be numbered from 0, below one number of parts",
            module=tuple(module),
            fix="Let `names` return (name, part, number of parts).",
        )
    shared = sorted(name for name, x in parts.items() if len({*x}) < len(x))
    _validate.require(
        not shared,
        "every layer of a target must have a module, or a part of one, of its own",
        shared=shared[:5],
        fix="Let `names` return (name, part, number of parts) for a module that holds "
        "several arrays.",
    )
    return {name: sorted(x) for name, x in parts.items()}


def num_matrices(shape: Sequence[int], axes: Axes) -> int:
    """The number of matrices that are stacked in an array."""
    return math.prod(shape[i] for i in axes.stack)


def array_names(module: str) -> tuple[str, str]:
    """The names of the two matrices of a module."""
    prefix = f"base_model.model.{module}"
    return f"{prefix}.lora_A.weight", f"{prefix}.lora_B.weight"


def to_arrays(
    factors: Mapping[str, Factors], modules: Modules, rank: int
) -> dict[str, np.ndarray]:
    """The matrices of all modules."""
    parts, arrays = parts_of(modules), {}
    for path, of_path in modules.items():
        a, b = (np.asarray(x, np.float32) for x in factors[path])
        stack = len(of_path)
        a, b = a.reshape(stack, -1, rank), b.reshape(stack, rank, -1)
        for module, matrix_a, matrix_b in zip(of_path, a, b, strict=True):
            shapes = _shapes(matrix_a.shape[0], matrix_b.shape[1], module, parts, rank)
            whole_a, whole_b = (
                arrays.setdefault(name, np.zeros(shape, np.float32))
                for name, shape in zip(array_names(module.name), shapes, strict=True)
            )
            block, outputs = _places(module, parts, rank, matrix_b.shape[1])
            whole_a[block], whole_b[outputs, block] = matrix_a.T, matrix_b.T
    return arrays


def _shapes(
    num_inputs: int, num_outputs: int, module: Module, parts: Parts, rank: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The shapes of both matrices of a module."""
    whole_rank = rank * len(parts.get(module.name, [0]))
    return (whole_rank, num_inputs), (module.num_parts * num_outputs, whole_rank)


def _places(
    module: Module, parts: Parts, rank: int, num_outputs: int
) -> tuple[slice, slice]:
    """Where a target is among the ranks, and among the outputs, of its module."""
    block = parts.get(module.name, [module.part]).index(module.part)
    return (
        slice(block * rank, (block + 1) * rank),
        slice(module.part * num_outputs, (module.part + 1) * num_outputs),
    )


def from_arrays(
    arrays: Mapping[str, np.ndarray],
    modules: Sequence[Module],
    parts: Parts,
    shape: Sequence[int],
    axes: Axes,
    rank: int,
) -> Factors:
    """The factors of a target of some shape, from the matrices of its modules.

    Without an entry of a module in `parts`, all its targets have the same factor A, as
    in files of other libraries.

    Raises:
      ValueError: if a matrix is missing, or has another shape.
    """
    wanted = factor_shapes(shape, axes, rank)
    num_inputs = math.prod(shape[i] for i in axes.input)
    num_outputs = math.prod(shape[i] for i in axes.output)
    pairs = []
    for module in modules:
        shapes = _shapes(num_inputs, num_outputs, module, parts, rank)
        whole_a, whole_b = (
            _matrix(arrays, name, shape)
            for name, shape in zip(array_names(module.name), shapes, strict=True)
        )
        block, outputs = _places(module, parts, rank, num_outputs)
        pairs.append((whole_a[block], whole_b[outputs, block]))
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
    adapters: Adapters, modules: Modules, more: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The content of `adapter_config.json`."""
    parts, alpha = parts_of(modules), adapters.alpha
    return {
        **_LORA_ONLY,
        **_patterns(parts, adapters.rank, alpha),
        "r": adapters.rank,
        "lora_alpha": _as_json(alpha),
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(parts),
        **(more or {}),
    }


def _patterns(parts: Parts, rank: int, alpha: float) -> dict[str, dict[str, float]]:
    """Ranks and alphas of modules with several targets, so that the scale is kept."""
    several = {name: len(x) for name, x in parts.items() if len(x) > 1}
    return {
        "rank_pattern": {name: k * rank for name, k in several.items()},
        "alpha_pattern": {name: _as_json(k * alpha) for name, k in several.items()},
    }


def _as_json(alpha: float) -> float:
    return int(alpha) if alpha == int(alpha) else alpha


def check_config(config: Any, parts: Parts, file: str) -> tuple[int, float]:
    """Returns the rank and alpha; raises ValueError for changes of another form.

    Args:
      config: the content of `adapter_config.json`.
      parts: the parts of modules that are targets; none for files of other libraries.
      file: the name of the file, for error messages.
    """
    fix = "Load a directory that lora.save or PEFT has written."
    _validate.require(
        isinstance(config, dict) and {"r", "lora_alpha"} <= {*config},
        "the configuration of adapters must have entries for r and lora_alpha",
        file=file,
        fix=fix,
    )
    rank = _validate.positive_integer(r=config["r"], fix=fix)
    alpha = _validate.positive(lora_alpha=config["lora_alpha"], fix=fix)
    for name, value in {**_LORA_ONLY, **_patterns(parts, rank, alpha)}.items():
        given = config.get(name, value)
        _validate.require(
            given == value or (not given and not value),
            f"only adapters with {name}={value!r} can be loaded",
            file=file,
            **{name: given},
            fix="Train adapters of that kind, or merge these ones with PEFT.",
        )
    return rank, alpha
