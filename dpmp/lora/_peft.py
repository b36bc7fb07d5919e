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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import _validate
from dpmp.lora._adapters import Axes, Factors, factor_shapes, sizes

ModuleName: TypeAlias = Callable[[str, int], str | tuple[str, int, int] | None]
"""As the argument `names` of `save`; None for a layer that has no module."""


class Module(NamedTuple):
    """A module, or one of the equal parts into which its outputs are divided."""

    name: str
    part: int = 0
    num_parts: int = 1


class Place(NamedTuple):
    """A target, with its shape, and a module for each matrix of its stack."""

    shape: Sequence[int]
    axes: Axes
    modules: Sequence[Module]


Parts: TypeAlias = Mapping[str, Sequence[int]]  # the adapted parts of each module


def place_of(
    path: str, shape: Sequence[int], axes: Axes, names: ModuleName | None
) -> Place:
    """The place of a target; without modules if `names` has none for a matrix."""
    number, _, _ = sizes(shape, axes)
    if names is None:
        plain = path.replace("/", ".")
        found = [f"{plain}.{i}" for i in range(number)] if axes.stack else [plain]
    else:
        found = [names(path, layer) for layer in range(number)]
    return Place(shape, axes, [] if None in found else [*map(as_module, found)])


def as_module(name: Any) -> Module:
    """Makes a module from an output of `names`."""
    return Module(name) if isinstance(name, str) else Module(*name)


def parts_of(places: Iterable[Place]) -> Parts:
    """The parts of each module that are targets, in order; checks all of them."""
    parts: dict[str, list[int]] = {}
    num_parts: dict[str, int] = {}
    for module in (x for place in places for x in place.modules):
        others = parts.setdefault(module.name, [])
        number = num_parts.setdefault(module.name, module.num_parts)
        if not (
            0 <= module.part < module.num_parts == number and module.part not in others
        ):
            _validate.fail(
                "every layer of a target must have a module, or a part of one, of its "
                "own, numbered from 0. Let `names` return (name, part, number of "
                "parts).",
                module=tuple(module),
                parts_of_others=others,
                number_for_others=number,
            )
        others.append(module.part)
    return {name: sorted(x) for name, x in parts.items()}


def array_names(module: str) -> tuple[str, str]:
    """The names of the two matrices of a module."""
    prefix = f"base_model.model.{module}"
    return f"{prefix}.lora_A.weight", f"{prefix}.lora_B.weight"


@dataclasses.dataclass(frozen=True)
class Layout:
    """The positions of the factors of all targets in the matrices of all modules."""

    places: Mapping[str, Place]
    rank: int
    # Targets in a module without an entry share A, as in files of other libraries.
    parts: Parts

    def to_arrays(self, factors: Mapping[str, Factors]) -> dict[str, np.ndarray]:
        """The matrices of all modules."""
        arrays = {name: np.zeros(x, np.float32) for name, x in self._shapes().items()}
        for path, (_, _, modules) in self.places.items():
            a, b = (np.asarray(x, np.float32) for x in factors[path])
            a = a.reshape(len(modules), -1, self.rank)
            b = b.reshape(len(modules), self.rank, -1)
            for i, (block_a, block_b) in enumerate(self._blocks(arrays, path)):
                block_a[...], block_b[...] = a[i].T, b[i].T
        return arrays

    def from_arrays(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Factors]:
        """The factors of all targets, if the matrices are those of all modules."""
        wanted, given = self._shapes(), {name: x.shape for name, x in arrays.items()}
        names = sorted({*wanted, *given})
        wrong = [name for name in names if wanted.get(name) != given.get(name)][:5]
        if not wanted or wrong:
            _validate.fail(
                "a file of adapters must have two matrices of matching shapes for "
                "each module of a target, and no others. Load the adapters that were "
                "made for this model, or pass other `names`.",
                given={name: given.get(name) for name in wrong},
                wanted={name: wanted.get(name) for name in wrong},
            )
        factors = {}
        for path, (shape, axes, _) in self.places.items():
            shape_a, shape_b = factor_shapes(shape, axes, self.rank)
            a, b = zip(*self._blocks(arrays, path), strict=True)
            factors[path] = Factors(_stacked(a, shape_a), _stacked(b, shape_b))
        return factors

    def _shapes(self) -> dict[str, tuple[int, int]]:
        """The names and shapes of all matrices."""
        shapes = {}
        for shape, axes, modules in self.places.values():
            _, num_inputs, num_outputs = sizes(shape, axes)
            for module in modules:
                rank = self.rank * len(self.parts.get(module.name, [0]))
                name_a, name_b = array_names(module.name)
                shapes[name_a] = rank, num_inputs
                shapes[name_b] = module.num_parts * num_outputs, rank
        return shapes

    def _blocks(
        self, arrays: Mapping[str, np.ndarray], path: str
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The parts of both matrices of each module that belong to a target."""
        shape, axes, modules = self.places[path]
        _, _, num_outputs = sizes(shape, axes)
        for module in modules:
            a, b = (arrays[name] for name in array_names(module.name))
            block = self.parts.get(module.name, [module.part]).index(module.part)
            ranks = slice(block * self.rank, (block + 1) * self.rank)
            outputs = slice(module.part * num_outputs, (module.part + 1) * num_outputs)
            yield a[ranks], b[outputs, ranks]


def _stacked(blocks: Sequence[np.ndarray], shape: Sequence[int]) -> jax.Array:
    """The factor of a target from the transposed factors of its matrices."""
    return jnp.asarray(np.stack([x.T for x in blocks]).reshape(shape), jnp.float32)


# Entries of a configuration that are for other changes than a sum of two factors.
_OTHER_FORMS = (
    "alora_invocation_tokens",
    "arrow_config",
    "layer_replication",
    "lora_bias",
    "target_parameters",
    "trainable_token_indices",
    "use_qalora",
)
# First factors that leave the base model as it was; others (PiSSA) change it too.
_FIRST_FACTORS = (None, True, False, "gaussian", "eva", "orthogonal")


def make_config(
    rank: int, alpha: float, parts: Parts, more: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The content of `adapter_config.json`."""
    return {
        **_fixed_entries(rank, alpha, parts),
        "r": rank,
        "lora_alpha": _as_json(alpha),
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(parts),
        **(more or {}),
    }


def check_config(config: Any, parts: Parts, file: str) -> tuple[int, float]:
    """Returns the rank and alpha; raises ValueError for changes of another form."""
    if not (isinstance(config, dict) and {"r", "lora_alpha"} <= {*config}):
        _validate.fail(
            "the configuration of adapters must have entries for r and lora_alpha. "
            "Load a directory that lora.save or PEFT has written.",
            file=file,
        )
    rank = _validate.positive_integer(r=config["r"], fix=f"Repair {file}.")
    alpha = _validate.positive(lora_alpha=config["lora_alpha"], fix=f"Repair {file}.")
    entries = _fixed_entries(rank, alpha, parts)
    if config.get("init_lora_weights") not in _FIRST_FACTORS:
        entries["init_lora_weights"] = True
    for name, value in {**dict.fromkeys(_OTHER_FORMS), **entries}.items():
        given = config.get(name, value)
        if given != value and (given or value):
            _validate.fail(
                f"adapters of dpmp have {name}={value!r}. Leave the entry out, or "
                "merge these adapters with PEFT.",
                file=file,
                **{name: given},
            )
    return rank, alpha


def _fixed_entries(rank: int, alpha: float, parts: Parts) -> dict[str, Any]:
    """Entries of a configuration whose other values stand for other changes."""
    # The rank and alpha of a module with several targets preserve the scale.
    several = {name: len(x) for name, x in parts.items() if len(x) > 1}
    return {
        "peft_type": "LORA",
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "rank_pattern": {name: k * rank for name, k in several.items()},
        "alpha_pattern": {name: _as_json(k * alpha) for name, k in several.items()},
    }


def _as_json(alpha: float) -> float:
    return int(alpha) if alpha == int(alpha) else alpha
