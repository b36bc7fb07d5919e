"""Clips the output of a function for each example, and adds the clipped outputs up."""

from collections.abc import Callable, Sequence
from typing import Any

from dpmp.clipping._clip_norms import ClipNorms
from dpmp.clipping._clipped_sum import ClippedSum, make_callable
from dpmp.clipping._sensitivity import BoundedSensitivityCallable
from dpmp.clipping._shards import Shards
from dpmp.engines import Signature, check_float_leaves, mappable, stack_engine
from dpmp.numerics import Arithmetic, parse_arithmetic


def clipped_fun(
    fun: Callable[..., Any],
    has_aux: bool = False,
    *,
    batch_argnums: int | Sequence[int] = 0,
    keep_batch_dim: bool = True,
    l2_clip_norm: Any,
    rescale_to_unit_norm: bool = False,
    normalize_by: float = 1.0,
    return_norms: bool = False,
    microbatch_size: int | None = None,
    nan_safe: bool = True,
    dtype: Any = None,
    prng_argnum: int | None = None,
    spmd_axis_name: str | Sequence[str] | Shards | None = None,
    arithmetic: str | Arithmetic | None = None,
) -> BoundedSensitivityCallable:
    """Makes a function that sums the clipped per-example outputs of `fun`.

    Each example is given to `fun`, and its output is scaled down to a norm of at most
    `l2_clip_norm` before the outputs are added up. `clipped_grad` does the same with
    the gradient of `fun`.

    >>> clipped_sum = clipped_fun(jnp.sum, l2_clip_norm=1.0)
    >>> print(f"{clipped_sum(jnp.array([0.0, 0.25, -0.5, 10.0])):.4f}")
    0.7422

    Guarantees:
      See `clipped_grad`: the same guarantees hold, with the output of `fun` in place of
      a gradient.

    Args:
      fun: returns a tree of float arrays, or (tree, aux) if `has_aux`.
      has_aux: whether `fun` returns a pair.
      batch_argnums: the positions of the arguments that have a leading example axis.
      keep_batch_dim: see `clipped_grad`.
      l2_clip_norm: see `clipped_grad`.
      rescale_to_unit_norm: see `clipped_grad`.
      normalize_by: see `clipped_grad`.
      return_norms: whether to return the norms before clipping, (B,). They are
        sensitive.
      microbatch_size: see `clipped_grad`.
      nan_safe: see `clipped_grad`.
      dtype: see `clipped_grad`.
      prng_argnum: see `clipped_grad`.
      spmd_axis_name: see `clipped_grad`.
      arithmetic: see `clipped_grad`.

    Returns:
      A callable with the arguments of `fun` and `is_padding_example`. It returns the
      sum; or (sum, aux) if `has_aux`, (sum, norms) if `return_norms`, and
      (sum, (aux, norms)) with both.

    Raises:
      ValueError: see `clipped_grad`.
    """
    sums = parse_arithmetic(arithmetic, dtype=dtype)
    signature = Signature.parse(
        batch_argnums=batch_argnums,
        prng_argnum=prng_argnum,
        keep_batch_dim=keep_batch_dim,
        has_aux=has_aux,
    )
    clip_norms = ClipNorms.from_tree(l2_clip_norm, rescale_to_unit_norm, normalize_by)

    def check(value):
        check_float_leaves(value, "the output of fun")
        clip_norms.check_prefix_of(value)

    value_fn = mappable(signature.of_one_example(fun, check), signature)

    def for_one_example(*args, **kwargs):
        value, aux = value_fn(*args, **kwargs)
        return value, (None, aux)

    def select(total, outputs):
        if has_aux and return_norms:
            return total, (outputs.aux, outputs.grad_norms)
        if has_aux or return_norms:
            return total, outputs.aux if has_aux else outputs.grad_norms
        return total

    clipped_sum = ClippedSum(
        engine=stack_engine(for_one_example, signature),
        signature=signature,
        clip_norms=clip_norms,
        arithmetic=clip_norms.fit(sums, nan_safe),
        microbatch_size=microbatch_size,
        nan_safe=nan_safe,
        shards=Shards.parse(spmd_axis_name),
    )
    return make_callable(
        clipped_sum,
        select,
        has_aux=has_aux or return_norms,
        has_params=False,
        l2_norm_bound=clipped_sum.l2_norm_bound,
    )
