"""Makes a gradient engine from the name of a method."""

from collections.abc import Callable
from typing import Any

import jax

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.engines import _per_example, _scaled_loss, book_keeping
from dpmp.engines._interface import GradEngine
from dpmp.engines._signature import Signature, check_loss
from dpmp.loss_scaling import LossScale

METHODS = ("per_example", "book_keeping")


def check_method(method: str, pre_clipping_transform: Any = None) -> None:
    """Raises ValueError for an unknown method, or one that cannot apply a transform."""
    _validate.require(
        method in METHODS,
        f"method must be one of {list(METHODS)}",
        method=method,
        fix='Use "book_keeping" for speed, "per_example" for exact sums.',
    )
    _validate.require(
        pre_clipping_transform is None or method != "book_keeping",
        "pre_clipping_transform needs an engine that forms gradients",
        method=method,
        fix='Use method="per_example", or build the transform into the loss.',
    )


def make_engine(
    fun: Callable[..., Any],
    signature: Signature,
    *,
    method: str,
    is_bounded: bool,
    loss_scale: LossScale | None = None,
    transform: Callable[[PyTree], PyTree] | None = None,
) -> tuple[GradEngine, Callable[..., int] | None]:
    """Makes the gradient engine of a loss as users write it.

    With `is_bounded`, norms must be upper bounds that include rounding errors. The
    other arguments are those of `clipped_grad`.

    Returns:
      The engine, and a function from its arguments to the largest microbatch size, or
      None if there is no limit.
    """
    loss_fn = signature.of_one_example(fun, check_loss)
    if loss_scale is not None:
        loss_fn = _scaled_loss.scaled(loss_fn, loss_scale)
    largest_microbatch = None
    if method == "book_keeping":
        engine = book_keeping.Engine(loss_fn, signature, is_bounded)
        largest_microbatch = engine.largest_microbatch if is_bounded else None
    else:
        loss_fn = _per_example.mappable(loss_fn, signature)

        def for_one_example(*args: Any, **kwargs: Any) -> tuple[PyTree, Any]:
            outputs, grads = jax.value_and_grad(
                loss_fn, signature.argnums, has_aux=True
            )(*args, **kwargs)
            return grads if transform is None else transform(grads), outputs

        engine = _per_example.stack_engine(for_one_example, signature)
    if loss_scale is not None:
        engine = _scaled_loss.unscaled(engine)
    return engine, largest_microbatch
