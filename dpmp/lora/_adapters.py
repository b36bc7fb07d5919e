"""Adapters: the factors of low-rank changes of frozen arrays, and their checks."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.lora._fingerprint import fingerprint
from dpmp.lora._names import by_path


class Axes(NamedTuple):
    """The roles of the axes of a frozen array.

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
      a: the factor that maps inputs to the rank axis, (stack..., input..., rank).
      b: the factor that maps the rank axis to outputs, (stack..., rank, output...).
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
      axes: the names of the targets, each with the roles of its axes.
      rank: the rank of the changes.
      alpha: the numerator of the scale `alpha / rank`.
      base: a fingerprint of the frozen arrays that the adapters belong to. It is None
        if lora.init ran under a transformation of jax, where the arrays are unknown.
    """

    factors: dict[str, Factors]
    axes: tuple[tuple[str, Axes], ...]
    rank: int
    alpha: float
    base: str | None

    @property
    def scale(self) -> float:
        """The scale `alpha / rank` of the product of the factors."""
        return self.alpha / self.rank

    def __getitem__(self, name: Any) -> NoReturn:
        """Refuses to stand for the parameters of a model, as in `params["w"]`."""
        _validate.fail(
            "the loss must be dpmp.lora.apply(loss_fn, params), whose first argument "
            "are adapters. A loss of parameters has no use for adapters.",
            error=TypeError,
            params=type(self).__name__,
        )

    def for_base(self, params: PyTree) -> "Adapters":
        """The same adapters for other frozen arrays, of the same names and shapes.

        Use it for the base model in another dtype, or with other arrays that were
        trained together with the adapters (a head). Do not use it for a model that
        differs in any other way: the adapters were not trained for that model.
        """
        _check_shapes(self, params)
        return dataclasses.replace(self, base=fingerprint(params))


def factor_shapes(
    shape: Sequence[int], axes: Axes, rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of both factors of an array."""
    stack, inputs, outputs = ([shape[i] for i in part] for part in axes)
    return (*stack, *inputs, rank), (*stack, rank, *outputs)


def factor_axes(axes: Axes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axis of the array for each axis of both factors; the rank is its `ndim`."""
    rank = sum(map(len, axes))
    return (*axes.stack, *axes.input, rank), (*axes.stack, rank, *axes.output)


def sizes(shape: Sequence[int], axes: Axes) -> tuple[int, int, int]:
    """The numbers of matrices, inputs and outputs of an array."""
    stack, inputs, outputs = (math.prod(shape[i] for i in part) for part in axes)
    return stack, inputs, outputs


def last_two(ndim: int) -> Axes:
    """The last two axes are inputs and outputs; the others stack matrices."""
    last = ndim - 1
    return Axes(tuple(range(last - 1)), (last - 1,), (last,))


def check_fits(adapters: Any, params: PyTree, base: str | None) -> None:
    """Raises ValueError unless `params`, of fingerprint `base`, fit the adapters."""
    check_adapters(adapters)
    if None not in (adapters.base, base) and adapters.base != base:
        _validate.fail(
            "adapters must be used with the frozen arrays that they were made for. "
            "Load the same base model, into which they were not merged before. If "
            "only its dtype is another one, or arrays of it were trained beside the "
            "adapters, pass adapters.for_base(params).",
            made_for=adapters.base,
            given=base,
        )
    _check_shapes(adapters, params)


def check_adapters(adapters: Any) -> None:
    """Raises ValueError unless the argument is an `Adapters`."""
    if not isinstance(adapters, Adapters):
        _validate.fail(
            "adapters must come from lora.init or lora.load. Pass them, and the "
            "parameters of the model apart from them.",
            type=type(adapters).__name__,
        )


def _check_shapes(adapters: Adapters, params: PyTree) -> None:
    arrays = by_path(params)
    check_targets(dict(adapters.axes), arrays)
    for path, axes in adapters.axes:
        wanted = factor_shapes(arrays[path].shape, axes, adapters.rank)
        given = tuple(map(jnp.shape, adapters.factors[path]))
        if given != wanted:
            _validate.fail(
                "the factors of adapters must have the shapes of their target. Load "
                "the model, and the adapters, that belong together.",
                target=path,
                shape=arrays[path].shape,
                factors=given,
                wanted=wanted,
            )


def check_targets(paths: Iterable[str], arrays: Mapping[str, Any]) -> None:
    """Raises ValueError unless the model has an array for each target."""
    missing = [path for path in paths if path not in arrays]
    if missing:
        _validate.fail(
            "every target of adapters must be an array of the model. Load the model "
            "that the adapters were made for.",
            missing=missing,
        )


def check_trained(trained: Adapters, *, initial: Adapters, params: PyTree) -> None:
    """Raises ValueError unless training has changed every factor, and nothing else.

    Adapters after private training are released values, so these checks reveal nothing
    more.

    Args:
      trained: the adapters after training, for example `state.params`.
      initial: the adapters before training.
      params: the frozen parameters, as they are after training.

    Raises:
      ValueError: if a factor did not move or is not finite, if the adapters have other
        targets, or if training has changed the frozen parameters. The message names the
        array.
    """
    check_adapters(trained)
    check_adapters(initial)
    # The base may have got another dtype, or another head.
    initial = dataclasses.replace(initial, base=trained.base)
    if jax.tree.structure(trained) != jax.tree.structure(initial):
        _validate.fail(
            "trained and initial adapters must be of the same targets, rank and "
            "alpha. Pass the adapters that training started from.",
            trained=[path for path, _ in trained.axes],
            initial=[path for path, _ in initial.axes],
        )
    check_fits(trained, params, fingerprint(params))
    before = dict(_named(initial))
    still = [name for name, x in _named(trained) if np.array_equal(x, before[name])]
    if still:
        _validate.fail(
            "training must move every factor of the adapters. If these are the "
            "adapters after training, look at the learning rate, and at whether the "
            "loss depends on these targets. (Without noise, the factors A move from "
            "the second step on.)",
            not_moved=", ".join(still[:3]),
            number=len(still),
        )
    check_finite(trained)


def check_finite(adapters: Adapters) -> None:
    """Raises ValueError if an entry of a factor is infinite or NaN."""
    bad = [name for name, x in _named(adapters) if not np.all(np.isfinite(x))]
    if bad:
        _validate.fail(
            "every entry of an adapter must be finite. Train with a lower learning "
            "rate.",
            not_finite=bad,
        )


def _named(adapters: Adapters) -> list[tuple[str, np.ndarray]]:
    return [
        (f"{path}.{name}", np.asarray(x))
        for path, factors in adapters.factors.items()
        for name, x in factors._asdict().items()
    ]
