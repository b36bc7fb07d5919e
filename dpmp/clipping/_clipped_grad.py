"""Sums of clipped per-example gradients, with a sensitivity that the floats keep.

    clip_coef = min(1, l2_clip_norm / norm)     for each example and clipping group
    sum       = sum of clip_coef * gradient     over the examples of the batch

Norms are float32 or wider whatever the dtype of the gradients. The clip norm is
lowered by a bound on all that rounding can add, in the norm, the coefficient and the
sum, so that `.sensitivity()` holds for the numbers that are computed.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax

from dpmp import _meshes, _validate, loss_scaling
from dpmp._numbers import as_number
from dpmp._typing import PyTree
from dpmp.clipping._clip_norms import ClipNorms
from dpmp.clipping._clipped_sum import ClippedSum, specs_of_examples, specs_of_sum
from dpmp.clipping._joint_sums import ReleasedMetrics, join
from dpmp.clipping._sensitivity import (
    BoundedSensitivityCallable as BoundedSensitivityCallable,
)
from dpmp.engines._methods import check_method, make_engine
from dpmp.engines._signature import Signature, check_float_leaves
from dpmp.loss_scaling import LossScale
from dpmp.numerics._arithmetic import parse

AuxiliaryOutput = collections.namedtuple(
    "AuxiliaryOutput", ["values", "grad_norms", "aux"]
)
"""Sensitive per-example outputs of `clipped_grad`; those not asked for are None."""


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
    loss_scale: LossScale | None = None,
    counts_overflows: bool = False,
    released_metrics: ReleasedMetrics | None = None,
    pre_clipping_transform: Callable[[PyTree], PyTree] | None = None,
    microbatch_size: int | None = None,
    nan_safe: bool = True,
    dtype: Any = None,
    prng_argnum: int | None = None,
    spmd_axis_name: Any = None,
    method: str = "per_example",
    arithmetic: str | None = None,
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
      - It works under `jax.jit` with sharded arguments, whatever the types of the axes
        of their mesh. Sums are sharded as the arguments that they are gradients of.
      - It works under `jax.shard_map` with `check_vma=False` for sums of integers,
        which `psum` may add. Float sums are refused there, as nothing covers what it
        costs to round their sum, and for the same reason those of parts of a batch must
        not be added outside: use `microbatch_size`.
      - With "exact" sums the clipped gradient is rounded to integers whose norm is
        checked in integer arithmetic; one that exceeded the bound all the same would
        contribute zero. The sum is the same, bit for bit, for any microbatch size,
        order of examples, padding and sharding, as long as the gradients are.
      - With the others, what rounding can add is taken from the clip norm: about 1e-6
        of it for the norm, and for the sum 1/128 with "float32", 2e-6 with the wider
        ones. It does not depend on the batch; batches too large for it are refused.
      - With `method="book_keeping"`, "bounded" sums (the default there) have a
        sensitivity that is proved for the bits that are computed
        (`dpmp.numerics._bounded`), as long as the other examples keep their places (not
        for ADD_OR_REMOVE_ONE). Float sums have none that is proved, and have to be
        asked for by names that say so, such as "unproved_float32": their sensitivity
        holds up to ordinary rounding within a microbatch. What is taken from the clip
        norm (1/256 for bfloat16, and more where a gradient is what is left of much
        larger terms) is more than what rounding was seen to add, but gradients can be
        made up for which it is not enough (by less than half).
      - Values, norms and aux are per example, depend on that example alone, and are
        sensitive.

    Args:
      fun: gives a scalar loss, or (loss, aux) if `has_aux`.
      argnums: which arguments to differentiate; they have no example axis.
      has_aux: whether `fun` returns a pair.
      l2_clip_norm: the clip norm, or a tree of clip norms that is a prefix of the
        gradient (for one argnum, of that argument): each clips its own part.
        One number may be a traced float scalar, if `rescale_to_unit_norm`: so a clip
        norm can follow the training without a new compilation. It must be public, as
        one that noisy releases decide on is. Where it is not from 1e-15 to 1e15, no
        example contributes.
      rescale_to_unit_norm: divides the clipped gradients by the clip norm (by the
        norm of all clip norms), which decouples it from the learning rate.
      normalize_by: divides the sum, usually by the expected batch size.
      batch_argnums: which arguments have a leading example axis, of one size.
      keep_batch_dim: whether `fun` is given one example as a batch of one (True) or
        without that axis (False).
      return_values: whether to return the per-example losses, (B,).
      return_grad_norms: whether to return the norms before clipping, (B,), float32.
      loss_scale: what the loss is multiplied by to be differentiated, for float16: a
        power of two, or a function from the loss of an example to one, such as
        `dpmp.loss_scaling.by_loss()`. What comes out is that of the loss itself. Scales
        that jax traces, or that come from a function, are rounded down to a power of
        two, from 2^-40 to 2^40; an example whose scale is negative or not finite
        contributes zero.
      counts_overflows: whether to return a `released_metrics.JointSum`: the sum, and
        one more coordinate for the noise, which counts gradients that are not finite.
        The sensitivity of both together is that of the sum.
      released_metrics: more coordinates of a `JointSum`; see there what they cost.
      pre_clipping_transform: applied to the gradient of each example before it is
        clipped; what it returns is what is clipped and summed.
      microbatch_size: how many examples to process at a time; must divide the batch
        size. Bounds memory. Microbatches of padding only are skipped. None is for all
        at once, or with "bounded" sums for the largest divisor of the batch size that
        leaves gradients whole, which depends on the positions of an example (8 examples
        of 128 positions, for instance) and is chosen when the loss is traced.
      nan_safe: selects zero for what is not finite; without it NaN goes through, for
        debugging, and `.sensitivity()` is infinite.
      dtype: of a float sum, float32 (None) or float64.
      prng_argnum: the position of a random key that is split over the examples.
      spmd_axis_name: as in `jax.vmap`.
      method: the gradient engine. "per_example" (vmap) forms the gradient of every
        example. "book_keeping" keeps activations and cotangents in place of them,
        which takes less time and, for what is neither wide nor multiplied by few
        positions, less memory; `book_keeping.summarize` shows what it does with a loss.
      arithmetic: of the sum: "exact" (leaves are `GridArray`: integers
        times a unit), "float32" (None), "float32x2" (leaves are `DoubleWord`) or
        "float64"; with book-keeping "bounded" (None; `GridArray`), or
        "unproved_float32", "unproved_float32x2" or "unproved_float64". See the README
        on which to use.
      resolution: of "exact" and "bounded" sums: how many units the largest contribution
        has; 32767 (None) for "exact", 2^22 for "bounded", or up to 2^22.

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
    check_method(method, pre_clipping_transform)
    sums = parse(arithmetic, method=method, dtype=dtype, resolution=resolution)
    loss_scale = as_number(loss_scale)
    if loss_scale is not None:
        loss_scaling.check(loss_scale, pre_clipping_transform)
    _check_safe(nan_safe, counts_overflows or released_metrics is not None)
    signature = Signature.parse(
        argnums=argnums,
        batch_argnums=batch_argnums,
        prng_argnum=prng_argnum,
        keep_batch_dim=keep_batch_dim,
        has_aux=has_aux,
    )
    clip_norms = ClipNorms.from_tree(l2_clip_norm, rescale_to_unit_norm, normalize_by)
    engine, largest_microbatch = make_engine(
        fun,
        signature,
        method=method,
        is_bounded=sums.clips_by_bounds,
        loss_scale=loss_scale,
        transform=_checked(pre_clipping_transform, clip_norms),
        spmd_axis_name=spmd_axis_name,
    )
    clipped_sum = ClippedSum(
        engine=engine,
        signature=signature,
        clip_norms=clip_norms,
        arithmetic=clip_norms.fit(sums, nan_safe),
        microbatch_size=microbatch_size,
        nan_safe=nan_safe,
        largest_microbatch=largest_microbatch,
    )
    returns_aux = has_aux or return_values or return_grad_norms

    def clipped_grad_fn(*args, is_padding_example, **kwargs):
        signature.check(args)
        if pre_clipping_transform is None:
            clip_norms.check_prefix_of(signature.params(args))
        total, outputs = clipped_sum(args, kwargs, is_padding_example)
        total = join(
            total,
            outputs,
            clipped_sum.l2_norm_bound,
            released_metrics,
            counts_overflows=counts_overflows,
        )
        if not returns_aux:
            return total
        return total, AuxiliaryOutput(
            outputs.values if return_values else None,
            outputs.grad_norms if return_grad_norms else None,
            outputs.aux if has_aux else None,
        )

    def out_specs(specs, output):
        total, outputs = output if returns_aux else (output, ())
        params = [] if pre_clipping_transform else signature.params(specs)
        return specs_of_sum(total, jax.tree.leaves(params)) + specs_of_examples(
            outputs, specs[signature.batch_argnums[0]]
        )

    l2_norm_bound = clipped_sum.l2_norm_bound
    if released_metrics is not None:
        l2_norm_bound = released_metrics.joint_norm_bound(l2_norm_bound)
    return BoundedSensitivityCallable(
        _meshes.on_automatic_axes(clipped_grad_fn, out_specs),
        l2_norm_bound,
        returns_aux,
        keeps_places=sums.clips_by_bounds,
    )


def _check_safe(nan_safe: bool, is_released: bool) -> None:
    _validate.require(
        nan_safe or not is_released,
        "what is counted or released must come of gradients that are safe",
        nan_safe=nan_safe,
        fix="Leave nan_safe out.",
    )


def _checked(
    transform: Callable[[PyTree], PyTree] | None, clip_norms: ClipNorms
) -> Callable[[PyTree], PyTree] | None:
    """A transform whose output is checked; None for none."""
    if transform is None:
        return None

    def checked(grads: PyTree) -> PyTree:
        grads = transform(grads)
        check_float_leaves(grads, "the output of pre_clipping_transform")
        clip_norms.check_prefix_of(grads)
        return grads

    return checked
