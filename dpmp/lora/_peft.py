"""The file layout for adapters of the library PEFT.

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

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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


Modules: TypeAlias = Mapping[str, Sequence[Module]]  # the modules of each target
Parts: TypeAlias = Mapping[str, Sequence[int]]  # the adapted parts of each module

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
      ValueError: if `names` returns None for a matrix.
    """
    number = num_matrices(shape, axes)
    if names is None:
        plain = path.replace("/", ".")
        found = [f"{plain}.{i}" for i in range(number)] if axes.stack else [plain]
    else:
        found = [names(path, layer) for layer in range(number)]
    _validate.require(
        None not in found,
        "every layer of a target must have a module name. Leave `names` out, or adapt "
        "arrays that are modules of the other library.",
        target=path,
        names=found,
    )
    return [as_module(x) for x in found if x is not None]


def as_module(name: str | Sequence[Any]) -> Module:
    """Makes a module from an output of `names`."""
    return Module(name) if isinstance(name, str) else Module(*name)


def parts_of(modules: Modules) -> dict[str, list[int]]:
    """The parts of each module that are targets, in order.

    Raises:
      ValueError: if two targets are the same part of a module, if a part is out of
        range, or if the number of parts of a module is ambiguous.
    """
    parts: dict[str, list[int]] = {}
    num_parts: dict[str, int] = {}
    for module in (x for of_path in modules.values() for x in of_path):
        others = parts.setdefault(module.name, [])
        number = num_parts.setdefault(module.name, module.num_parts)
        _validate.require(
            module.part not in others,
            "every layer of a target must have a module, or a part of one, of its own. "
            "Let `names` return (name, part, number of parts).",
            shared=module.name,
        )
        _validate.require(
            0 <= module.part < module.num_parts == number,
            "the parts of a module must be numbered from 0, below one number of parts. "
            "Let `names` return (name, part, number of parts).",
            module=tuple(module),
        )
        others.append(module.part)
    return {name: sorted(x) for name, x in parts.items()}


def num_matrices(shape: Sequence[int], axes: Axes) -> int:
    """The number of matrices that are stacked in an array."""
    return math.prod(shape[i] for i in axes.stack)


def array_names(module: str) -> tuple[str, str]:
    """The names of the two matrices of a module."""
    prefix = f"base_model.model.{module}"
    return f"{prefix}.lora_A.weight", f"{prefix}.lora_B.weight"


@dataclasses.dataclass(frozen=True)
class Layout:
    """The positions of the factors of all targets in the matrices of all modules.

    Attributes:
      modules: the modules of each target.
      axes: the roles of the axes of each target.
      shapes: the shape of each array of the model.
      rank: the rank of the changes.
      parts: the parts of each module that are targets. All targets in a module without
        an entry have the same factor A, as in files of other libraries.
    """

    modules: Modules
    axes: Mapping[str, Axes]
    shapes: Mapping[str, Sequence[int]]
    rank: int
    parts: Parts

    def matrices(self) -> dict[str, tuple[int, int]]:
        """The names and shapes of all matrices."""
        shapes = {}
        for path, module in (
            (p, x) for p, of_path in self.modules.items() for x in of_path
        ):
            num_inputs, num_outputs = self._sizes(path)
            rank = self.rank * len(self.parts.get(module.name, [0]))
            name_a, name_b = array_names(module.name)
            shapes[name_a] = rank, num_inputs
            shapes[name_b] = module.num_parts * num_outputs, rank
        return shapes

    def blocks(
        self, arrays: Mapping[str, np.ndarray], path: str
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The parts of both matrices of each module that belong to a target."""
        _, num_outputs = self._sizes(path)
        for module in self.modules[path]:
            a, b = (arrays[name] for name in array_names(module.name))
            block = self.parts.get(module.name, [module.part]).index(module.part)
            ranks = slice(block * self.rank, (block + 1) * self.rank)
            outputs = slice(module.part * num_outputs, (module.part + 1) * num_outputs)
            yield a[ranks], b[outputs, ranks]

    def _sizes(self, path: str) -> tuple[int, int]:
        """The numbers of inputs and of outputs of a target."""
        shape, (_, inputs, outputs) = self.shapes[path], self.axes[path]
        return math.prod(shape[i] for i in inputs), math.prod(shape[i] for i in outputs)


def to_arrays(layout: Layout, factors: Mapping[str, Factors]) -> dict[str, np.ndarray]:
    """The matrices of all modules."""
    arrays = {name: np.zeros(x, np.float32) for name, x in layout.matrices().items()}
    for path in layout.modules:
        a, b = (np.asarray(x, np.float32) for x in factors[path])
        for i, (block_a, block_b) in enumerate(layout.blocks(arrays, path)):
            stack = len(layout.modules[path])
            block_a[...] = a.reshape(stack, -1, layout.rank)[i].T
            block_b[...] = b.reshape(stack, layout.rank, -1)[i].T
    return arrays


def from_arrays(layout: Layout, arrays: Mapping[str, np.ndarray]) -> dict[str, Factors]:
    """The factors of all targets.

    Raises:
      ValueError: if a matrix is missing, has another shape or belongs to no target.
    """
    wanted = layout.matrices()
    _validate.require(
        bool(wanted) and {*wanted} >= {*arrays},
        "every array of the file must belong to a target of the model. Load the model "
        "that the adapters were made for, or pass other `names`.",
        unknown=sorted({*arrays} - {*wanted})[:5],
    )
    for name, shape in wanted.items():
        given = arrays[name].shape if name in arrays else None
        _validate.require(
            given == shape,
            "a file of adapters must have two matrices of matching shapes for each "
            "module. Load the adapters that were made for this model.",
            matrix=name,
            shape=given,
            wanted=shape,
        )
    factors = {}
    for path, axes in layout.axes.items():
        shapes = factor_shapes(layout.shapes[path], axes, layout.rank)
        pairs = zip(*layout.blocks(arrays, path), strict=True)
        factors[path] = Factors(
            *(
                jnp.asarray(np.stack([x.T for x in blocks]).reshape(shape), jnp.float32)
                for blocks, shape in zip(pairs, shapes, strict=True)
            )
        )
    return factors


def make_config(
    adapters: Adapters, parts: Parts, more: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The content of `adapter_config.json`."""
    return {
        **_LORA_ONLY,
        **_patterns(parts, adapters.rank, adapters.alpha),
        "r": adapters.rank,
        "lora_alpha": _as_json(adapters.alpha),
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(parts),
        **(more or {}),
    }


def _patterns(parts: Parts, rank: int, alpha: float) -> dict[str, dict[str, float]]:
    """Ranks and alphas of modules with several targets, which preserve the scale."""
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
      parts: the parts of modules that are targets; empty for files of other libraries.
      file: the name of the file, for error messages.
    """
    _validate.require(
        isinstance(config, dict) and {"r", "lora_alpha"} <= {*config},
        "the configuration of adapters must have entries for r and lora_alpha. Load a "
        "directory that lora.save or PEFT has written.",
        file=file,
    )
    rank = _validate.positive_integer(r=config["r"], fix=f"Repair {file}.")
    alpha = _validate.positive(lora_alpha=config["lora_alpha"], fix=f"Repair {file}.")
    for name, value in {**_LORA_ONLY, **_patterns(parts, rank, alpha)}.items():
        given = config.get(name, value)
        _validate.require(
            given == value or (not given and not value),
            f"only adapters with {name}={value!r} can be loaded. Merge these ones with "
            "PEFT.",
            file=file,
            **{name: given},
        )
    return rank, alpha
