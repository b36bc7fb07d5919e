"""Adapters: the factors of the changes of frozen arrays."""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.lora._checksums import checksums
from dpmp.lora._paths import by_path
from dpmp.lora._views import RANK, Label


class Axes(NamedTuple):
    """What the axes of a frozen array are for.

    Attributes:
      stack: the axes over which matrices are stacked, such as those of layers.
      input: the axes that a product with the array sums over.
      output: the other axes.
    """

    stack: tuple[int, ...]
    input: tuple[int, ...]
    output: tuple[int, ...]


class Factors(NamedTuple):
    """The factors of the change of one array.

    Attributes:
      a: the factor that inputs are multiplied with, (stack..., input..., rank).
      b: the factor that gives outputs, (stack..., rank, output...).
    """

    a: jax.Array
    b: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["factors"],
    meta_fields=["axes", "rank", "alpha", "base"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapters:
    """The factors of all targets: a tree of arrays, to be trained like parameters.

    The change of a target W is `alpha / rank` times the product of its factors.

    Attributes:
      factors: the factors of each target, by its name.
      axes: the names of the targets, each with what its axes are for.
      rank: the rank of the changes.
      alpha: the size of the changes, times their rank.
      base: a fingerprint of the frozen arrays that the adapters belong to. It is None
        if they were unknown, because lora.init ran under a transformation of jax.
    """

    factors: dict[str, Factors]
    axes: tuple[tuple[str, Axes], ...]
    rank: int
    alpha: float
    base: str | None

    @property
    def scale(self) -> float:
        """The number that the product of the factors is multiplied with."""
        return self.alpha / self.rank

    def for_base(self, params: PyTree) -> "Adapters":
        """The same adapters for other frozen arrays, of the same names and shapes.

        Use it for the base model in another dtype. On an otherwise different model,
        adapters do something that nobody has trained.
        """
        check_shapes(self, params)
        return dataclasses.replace(self, base=fingerprint(params))


def fingerprint(params: PyTree) -> str | None:
    """A hash of the names, types and values of arrays; None for traced arrays."""
    arrays = by_path(params)
    if any(isinstance(x, jax.core.Tracer) for x in arrays.values()):
        return None
    # Arrays may be known while another function is traced.
    with jax.ensure_compile_time_eval():
        sums = np.asarray(checksums([jnp.asarray(x) for x in arrays.values()]))
    types = [f"{path} {x.dtype} {x.shape}" for path, x in arrays.items()]
    content = "\n".join(types).encode() + sums.tobytes()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def check_adapters(adapters: Any) -> None:
    """Raises ValueError unless the argument is an `Adapters`."""
    _validate.require(
        isinstance(adapters, Adapters),
        "adapters must come from lora.init or lora.load",
        type=type(adapters).__name__,
        fix="Pass the adapters, and the parameters of the model apart from them.",
    )


def check_base(adapters: Adapters, base: str | None) -> None:
    """Raises ValueError if the adapters belong to another base."""
    _validate.require(
        None in (adapters.base, base) or adapters.base == base,
        "adapters must be used with the frozen arrays that they were made for",
        made_for=adapters.base,
        given=base,
        fix="Load the same base model. If these adapters were merged into it before, "
        "load it anew. If only its dtype is another one, pass "
        "adapters.for_base(params).",
    )


def check_shapes(adapters: Adapters, params: PyTree) -> None:
    """Raises ValueError unless every factor fits its target."""
    arrays = by_path(params)
    for path, axes in adapters.axes:
        _validate.require(
            path in arrays,
            "every target of adapters must be an array of the model",
            target=path,
            fix="Load the model that the adapters were made for.",
        )
        wanted = factor_shapes(arrays[path].shape, axes, adapters.rank)
        given = tuple(map(jnp.shape, adapters.factors[path]))
        _validate.require(
            given == wanted,
            "the factors of adapters must have the shapes of their target",
            target=path,
            shape=arrays[path].shape,
            factors=given,
            wanted=wanted,
            fix="Load the model, and the adapters, that belong together.",
        )


def factor_shapes(
    shape: Sequence[int], axes: Axes, rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of both factors of an array."""
    stack, inputs, outputs = ([shape[i] for i in part] for part in axes)
    return (*stack, *inputs, rank), (*stack, rank, *outputs)


def factor_labels(axes: Axes) -> tuple[tuple[Label, ...], ...]:
    """The labels of the axes of both factors."""
    stack, inputs, outputs = ([Label((i,)) for i in part] for part in axes)
    return (*stack, *inputs, RANK), (*stack, RANK, *outputs)


def last_two(ndim: int) -> Axes:
    """The last two axes are inputs and outputs; the others stack matrices."""
    last = ndim - 1
    return Axes(tuple(range(last - 1)), (last - 1,), (last,))
