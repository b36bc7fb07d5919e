"""Sums of clipped per-example gradients, with a sensitivity that the floats keep.

    clip_coef = min(1, l2_clip_norm / norm)     for each example and clipping group
    sum       = sum of clip_coef * gradient     over the examples of the batch

Norms are float32 or wider whatever the dtype of the gradients. The clip norm is
lowered by a bound on all that rounding can add, in the norm, the coefficient and the
sum, so that `.sensitivity()` holds for the numbers that are computed.
"""

import collections
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp

from dpmp import (
    _accumulation,
    _arguments,
    _clip_norms,
    _clipped_sum,
    _per_example,
    _validate,
    book_keeping,
)
from dpmp._accumulation import Accumulator
from dpmp._clip_norms import ClipNorms
from dpmp._clipped_sum import ClippedSum
from dpmp._grid import DEFAULT_RESOLUTION, Grid
from dpmp._typing import PyTree

AuxiliaryOutput = collections.namedtuple(
    "AuxiliaryOutput", ["values", "grad_norms", "aux"]
)
"""Sensitive per-example outputs of `clipped_grad`; those not asked for are None."""


@dataclass(frozen=True)
class BoundedSensitivityCallable:
    """A function of a batch whose output is bounded in sensitivity.

    If `has_aux` is False the bound holds for the whole output; otherwise the output
    is a pair, the bound holds for its first part, and the second part is sensitive:
    per-example values that must not be released.

    Attributes:
      fun: the function.
      l2_norm_bound: what one example adds to the sum, at most, in L2 norm.
      has_aux: whether the output is a pair.
    """

    fun: Callable[..., Any]
    l2_norm_bound: float
    has_aux: bool

    def __call__(
        self, *args: Any, is_padding_example: jax.Array | None = None, **kwargs: Any
    ) -> Any:
        """Calls `fun`; see the function that made this one."""
        return self.fun(*args, is_padding_example=is_padding_example, **kwargs)

    def sensitivity(
        self,
        neighboring_relation: dp_accounting.NeighboringRelation = (
            dp_accounting.NeighboringRelation.REPLACE_SPECIAL
        ),
    ) -> float:
        """The L2 sensitivity of the computed output.

        Guarantees:
          The bound holds for the floats that come out, also for two batches of
          different sizes: what rounding adds has been taken from the clip norm. It is
          twice as large for replace-one as for add/remove and zero-out
          (REPLACE_SPECIAL).

        Args:
          neighboring_relation: which two batches are neighbours.

        Returns:
          The sensitivity, in the unit of the output.

        Raises:
          ValueError: if `neighboring_relation` is not one of dp_accounting's.
        """
        relations = dp_accounting.NeighboringRelation
        _validate.require(
            isinstance(neighboring_relation, relations),
            "neighboring_relation must be a dp_accounting.NeighboringRelation",
            neighboring_relation=neighboring_relation,
            fix="Use ADD_OR_REMOVE_ONE, REPLACE_ONE or REPLACE_SPECIAL.",
        )
        replaces_one = neighboring_relation is relations.REPLACE_ONE
        return self.l2_norm_bound * (2 if replaces_one else 1)


def clip_pytree(
    pytree: PyTree,
    clip_norm: Any,
    rescale_to_unit_norm: bool = False,
    nan_safe: bool = True,
    return_zero: bool | jax.Array = False,
) -> tuple[PyTree, jax.Array]:
    """Scales a pytree down to an L2 norm of at most `clip_norm`.

    >>> clipped, norm = clip_pytree({"w": jnp.array([3.0, 4.0])}, 1.0)
    >>> print(norm, clipped["w"])
    5.0 [0.59999967 0.7999996 ]

    Guarantees:
      The norm of the computed output is at most `clip_norm`, or 1 if
      `rescale_to_unit_norm`, unless it is mapped by `jax.vmap` (use `clipped_fun` for
      batches). Edge cases:

      | case                       | rescale_to_unit_norm | output               |
      | :------------------------- | :------------------- | :------------------- |
      | clip_norm 0                | False                | zero                 |
      | clip_norm 0                | True                 | the input / its norm |
      | clip_norm infinite         | False                | the input            |
      | clip_norm infinite         | True                 | zero                 |
      | the norm is 0              | either               | zero                 |
      | infinite or NaN in the input or its norm | either | zero, if `nan_safe`  |

    Args:
      pytree: float arrays of any shapes.
      clip_norm: a number, or a tree of numbers that is a prefix of `pytree`: each
        clips its part.
      rescale_to_unit_norm: divides the output by `clip_norm` (by the norm of all
        clip norms, if there are several).
      nan_safe: selects zero in place of anything that is not finite; without it NaN
        goes through and the guarantee is void for such input.
      return_zero: selects zero whatever the input.

    Returns:
      The clipped tree, in float32 or wider (a narrower dtype would round the norm
      above the bound again), and the norm of the input, which is sensitive.

    Raises:
      ValueError: for a negative, NaN or traced clip norm, one that is no prefix of
        `pytree`, and leaves that are not float arrays.
    """
    clip_norms = ClipNorms.from_tree(clip_norm, rescale_to_unit_norm, 1.0)
    _arguments.check_float_leaves(pytree, "pytree")
    clip_norms.check_prefix_of(pytree)
    return_zero = jnp.asarray(return_zero)
    _validate.require(
        return_zero.shape == () and return_zero.dtype == jnp.dtype("bool"),
        "return_zero must be one bool",
        shape=return_zero.shape,
        dtype=return_zero.dtype.name,
        fix="For a batch, use clipped_fun and is_padding_example.",
    )
    grads = _per_example.store_one(pytree)
    norms = grads.squared_norms(clip_norms.prefix)
    norm = _clip_norms.global_norm(norms)
    clipped = grads.weighted_sum(
        _clip_norms.coefficients(clip_norms.targets, norms),
        _clipped_sum.keep_mask(norm, return_zero[None], nan_safe),
        clip_norms.prefix,
        _accumulation.get_accumulator(None, norm.dtype),
    )
    return clipped, norm[0]


def clipped_fun(
    fun: Callable[..., Any],
    has_aux: bool = False,
    *,
    batch_argnums: int | Sequence[int] = 0,
    keep_batch_dim: bool = True,
    l2_clip_norm: Any = 1.0,
    rescale_to_unit_norm: bool = False,
    normalize_by: float = 1.0,
    return_norms: bool = False,
    microbatch_size: int | None = None,
    nan_safe: bool = True,
    dtype: Any = None,
    prng_argnum: int | None = None,
    spmd_axis_name: Any = None,
    accumulator: str | None = None,
    resolution: int | None = None,
) -> BoundedSensitivityCallable:
    """Clips the output of a function for each example, and sums over the batch.

    >>> clipped_sum = clipped_fun(jnp.sum, l2_clip_norm=1.0)
    >>> print(f"{clipped_sum(jnp.array([0.0, 0.25, -0.5, 10.0])):.4f}")
    0.7422

    Guarantees:
      As for `clipped_grad`, of which this is the part without differentiation.

    Args:
      fun: gives a tree of float arrays, or (tree, aux) if `has_aux`.
      has_aux: whether `fun` returns a pair.
      batch_argnums: which arguments have a leading example axis.
      keep_batch_dim: as in `clipped_grad`.
      l2_clip_norm: as in `clipped_grad`.
      rescale_to_unit_norm: as in `clipped_grad`.
      normalize_by: as in `clipped_grad`.
      return_norms: whether to return the norms before clipping, (B,); sensitive.
      microbatch_size: as in `clipped_grad`.
      nan_safe: as in `clipped_grad`.
      dtype: as in `clipped_grad`.
      prng_argnum: as in `clipped_grad`.
      spmd_axis_name: as in `jax.vmap`.
      accumulator: as in `clipped_grad`.
      resolution: as in `clipped_grad`.

    Returns:
      A callable with the arguments of `fun` and `is_padding_example`. It returns the
      sum, or (sum, aux), (sum, norms) or (sum, (aux, norms)), as asked for.

    Raises:
      ValueError: as for `clipped_grad`.
    """
    batch_argnums = _arguments.as_argnums("batch_argnums", batch_argnums)
    clip_norms = ClipNorms.from_tree(l2_clip_norm, rescale_to_unit_norm, normalize_by)

    @_arguments.of_one_example(batch_argnums, keep_batch_dim)
    def value_fn(*args, **kwargs):
        output = fun(*args, **kwargs)
        value, aux = _arguments.unpack_aux(output) if has_aux else (output, None)
        _arguments.check_float_leaves(value, "the output of fun")
        clip_norms.check_prefix_of(value)
        return value, aux

    def for_one_example(*args, **kwargs):
        value, aux = value_fn(*args, **kwargs)
        return value, (None, aux)

    clipped_sum = ClippedSum(
        engine=_per_example.stack_engine(
            for_one_example,
            batch_argnums=batch_argnums,
            prng_argnum=prng_argnum,
            spmd_axis_name=spmd_axis_name,
        ),
        clip_norms=clip_norms,
        accumulator=_get_accumulator(
            accumulator, dtype, resolution, clip_norms, nan_safe
        ),
        batch_argnums=batch_argnums,
        prng_argnum=prng_argnum,
        microbatch_size=microbatch_size,
        nan_safe=nan_safe,
    )

    def clipped_fn(*args, is_padding_example, **kwargs):
        total, (_, norms, aux) = clipped_sum(args, kwargs, is_padding_example)
        if has_aux and return_norms:
            return total, (aux, norms)
        if has_aux or return_norms:
            return total, aux if has_aux else norms
        return total

    return BoundedSensitivityCallable(
        clipped_fn, clipped_sum.l2_norm_bound, has_aux or return_norms
    )


def clipped_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    l2_clip_norm: Any,
    rescale_to_unit_norm: bool = False,
    normalize_by: float = 1.0,
    batch_argnums: int | Sequence[int] = 1,
    keep_batch_dim: bool = True,
    return_values: bool = False,
    return_grad_norms: bool = False,
    pre_clipping_transform: Callable[[PyTree], PyTree] | None = None,
    microbatch_size: int | None = None,
    nan_safe: bool = True,
    dtype: Any = None,
    prng_argnum: int | None = None,
    spmd_axis_name: Any = None,
    method: str = "per_example",
    accumulator: str | None = None,
    resolution: int | None = None,
) -> BoundedSensitivityCallable:
    """Makes a function that sums the clipped per-example gradients of `fun`.

    Like `jax.grad`, with the gradient of each example scaled down to a norm of at
    most `l2_clip_norm` before they are summed.

    >>> def loss(w, x):
    ...     return 0.5 * jnp.mean((x - w) ** 2)
    >>> grad_fn = clipped_grad(loss, l2_clip_norm=3.5, return_grad_norms=True)
    >>> grad, sensitive = grad_fn(3.0, jnp.array([0.0, 7.0, -2.0]))
    >>> print(f"{grad:.4f}", sensitive.grad_norms)
    3.0000 [3. 4. 5.]

    Groups (user-level privacy): with `keep_batch_dim=False` and one more axis in the
    batch, what is clipped is the gradient of the mean over a user's examples.

    >>> user_grad_fn = clipped_grad(loss, l2_clip_norm=3.5, keep_batch_dim=False)
    >>> print(user_grad_fn(3.0, jnp.array([[1.0, -1.0], [2.0, 2.0], [0.0, 3.0]])))
    5.5

    Guarantees:
      The L2 sensitivity of the computed sum is at most `.sensitivity(relation)`,
      that is `l2_clip_norm / normalize_by` under add/remove and zero-out, or
      `1 / normalize_by` if `rescale_to_unit_norm`, and twice that under replace-one.
      With a tree of clip norms, the norm of all of them takes the place of
      `l2_clip_norm`. Conditions: `nan_safe`; the gradient of an example depends on
      no other example (no batch statistics), nor on its place in the batch, also in
      its last bits (XLA does not promise that; see the README); the key of
      `prng_argnum`, whose parts go by place, is secret and used once; and no
      `jax.vmap` around this function, which lets the compiler compute gradients
      twice, in two ways, for the norm and for the sum. Then:

      - An example whose gradient is not finite, or whose squared norm overflows the
        norm's dtype, contributes zero, by selection. So does a padding example.
      - An empty batch, or one of padding only, gives zero.
      - It works under `jax.jit`, with sharded arguments, and under `jax.shard_map`
        with `check_vma=False`.
      - With "exact" sums the clipped gradient is rounded to integers whose norm is
        checked in integer arithmetic; one that exceeded the bound all the same would
        contribute zero. The sum is the same, bit for bit, for any microbatch size,
        order of examples, padding and sharding, as long as the gradients are.
      - With the others, what rounding can add is taken from the clip norm: about 1e-6
        of it for the norm, and for the sum 1/128 with "float32", 2e-6 with the wider
        ones. It does not depend on the batch; batches too large for it are refused.
      - Values, norms and aux are per example, depend on that example alone, and are
        sensitive.

    Args:
      fun: gives a scalar loss, or (loss, aux) if `has_aux`.
      argnums: which arguments to differentiate; they have no example axis.
      has_aux: whether `fun` returns a pair.
      l2_clip_norm: the clip norm, or a tree of clip norms that is a prefix of the
        gradient (for one argnum, of that argument): each clips its own part.
      rescale_to_unit_norm: divides the clipped gradients by the clip norm (by the
        norm of all clip norms), which decouples it from the learning rate.
      normalize_by: divides the sum, usually by the expected batch size.
      batch_argnums: which arguments have a leading example axis, of one size.
      keep_batch_dim: whether `fun` is given one example as a batch of one (True) or
        without that axis (False).
      return_values: whether to return the per-example losses, (B,).
      return_grad_norms: whether to return the norms before clipping, (B,), float32.
      pre_clipping_transform: applied to the gradient of each example before it is
        clipped; what it returns is what is clipped and summed.
      microbatch_size: how many examples to process at a time; must divide the batch
        size. Bounds memory. Microbatches of padding only are skipped.
      nan_safe: selects zero for what is not finite; without it NaN goes through, for
        debugging, and `.sensitivity()` is infinite.
      dtype: of the sum, float32 (None) or float64.
      prng_argnum: the position of a random key that is split over the examples.
      spmd_axis_name: as in `jax.vmap`.
      method: the gradient engine; "per_example" (vmap) is the only one as yet.
      accumulator: the arithmetic of the sum: "exact" (leaves are `GridArray`: integers
        times a unit), "float32" (None), "float32x2" (leaves are `DoubleWord`) or
        "float64"; see the README on which to use.
      resolution: of "exact" sums: how many units the largest contribution has, 32767
        (None) or up to 2^22.

    Returns:
      A callable with the arguments of `fun` and the keyword `is_padding_example`, a
      (B,) bool array. Keyword arguments reach `fun` unchanged for every example. It
      returns the sum, or (sum, AuxiliaryOutput) if `has_aux`, `return_values` or
      `return_grad_norms`.

    Raises:
      ValueError: at construction for contradictory or invalid arguments; when called,
        before anything is differentiated, for arguments whose shapes or dtypes do not
        fit, a batch that `microbatch_size` does not divide, and a batch so large that
        the rounding of its sum is not covered.

    References:
      [Abadi et al.: Deep learning with differential privacy, algorithm
      1](https://arxiv.org/abs/1607.00133)
      [De et al.: Unlocking high-accuracy differentially private image classification,
      section 3 (rescaling)](https://arxiv.org/abs/2204.13650)
    """
    _validate.require(
        method in ("per_example", "book_keeping"),
        'method must be "per_example" or "book_keeping"',
        method=method,
        fix="Leave it out.",
    )
    batch_argnums = _arguments.as_argnums("batch_argnums", batch_argnums)
    grad_argnums = _arguments.as_argnums("argnums", argnums)
    _arguments.check_disjoint(grad_argnums, batch_argnums, prng_argnum)
    clip_norms = ClipNorms.from_tree(l2_clip_norm, rescale_to_unit_norm, normalize_by)

    @_arguments.of_one_example(batch_argnums, keep_batch_dim)
    def loss_fn(*args, **kwargs):
        output = fun(*args, **kwargs)
        value, aux = _arguments.unpack_aux(output) if has_aux else (output, None)
        _arguments.check_loss(value)
        return value, aux

    def for_one_example(*args, **kwargs):
        outputs, grads = jax.value_and_grad(loss_fn, argnums, has_aux=True)(
            *args, **kwargs
        )
        if pre_clipping_transform is not None:
            grads = pre_clipping_transform(grads)
            _arguments.check_float_leaves(grads, "the output of pre_clipping_transform")
        clip_norms.check_prefix_of(grads)
        return grads, outputs

    if method == "book_keeping":
        make_engine = functools.partial(book_keeping.engine, loss_fn, argnums=argnums)
    else:
        make_engine = functools.partial(_per_example.stack_engine, for_one_example)
    clipped_sum = ClippedSum(
        engine=make_engine(
            batch_argnums=batch_argnums,
            prng_argnum=prng_argnum,
            spmd_axis_name=spmd_axis_name,
        ),
        clip_norms=clip_norms,
        accumulator=_get_accumulator(
            accumulator, dtype, resolution, clip_norms, nan_safe
        ),
        batch_argnums=batch_argnums,
        prng_argnum=prng_argnum,
        microbatch_size=microbatch_size,
        nan_safe=nan_safe,
    )
    returns_aux = has_aux or return_values or return_grad_norms

    def clipped_grad_fn(*args, is_padding_example, **kwargs):
        _arguments.check_num_args(args, (*grad_argnums, *batch_argnums))
        for i in grad_argnums:
            _arguments.check_float_leaves(args[i], f"argument {i}")
        total, (values, norms, aux) = clipped_sum(args, kwargs, is_padding_example)
        if not returns_aux:
            return total
        return total, AuxiliaryOutput(
            values if return_values else None,
            norms if return_grad_norms else None,
            aux if has_aux else None,
        )

    return BoundedSensitivityCallable(
        clipped_grad_fn, clipped_sum.l2_norm_bound, returns_aux
    )


def _get_accumulator(
    accumulator: str | None,
    dtype: Any,
    resolution: int | None,
    clip_norms: ClipNorms,
    nan_safe: bool,
) -> Accumulator | Grid:
    is_exact = accumulator == "exact"
    _validate.require(
        dtype is None if is_exact else resolution is None,
        'dtype goes with float sums, and resolution with accumulator="exact"',
        accumulator=accumulator,
        dtype=dtype,
        resolution=resolution,
        fix="Leave out the other one.",
    )
    if not is_exact:
        return _accumulation.get_accumulator(accumulator, dtype)
    return Grid.from_bounds(
        [bound for bound, _ in clip_norms.targets],
        clip_norms.l2_norm_bound if nan_safe else math.inf,
        DEFAULT_RESOLUTION if resolution is None else resolution,
    )
