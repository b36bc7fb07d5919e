"""Sums clipped per-example gradients, with a bound that holds for the computed sum.

    clip_coef = min(1, l2_clip_norm / norm)     for each example and clipping group
    sum       = sum of clip_coef * gradient     over the examples of the batch

The clip norm is lowered by a bound on the rounding errors of these computations.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.clipping._callables import BoundedSensitivityCallable, make_callable
from dpmp.clipping._clip_norms import ClipNorms
from dpmp.clipping._clipped_sum import ClippedSum
from dpmp.clipping._joint_sums import JointCoordinates, ReleasedMetrics
from dpmp.clipping._shards import Shards
from dpmp.engines import Signature, check_float_leaves, check_method, make_engine
from dpmp.loss_scaling import ScaledLoss
from dpmp.numerics import Arithmetic, parse_arithmetic

AuxiliaryOutput = collections.namedtuple(
    "AuxiliaryOutput", ["values", "grad_norms", "aux"]
)
"""The sensitive per-example outputs of `clipped_grad`; None if not requested."""


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
    released_metrics: ReleasedMetrics | None = None,
    pre_clipping_transform: Callable[[PyTree], PyTree] | None = None,
    microbatch_size: int | None = None,
    nan_safe: bool = True,
    dtype: Any = None,
    prng_argnum: int | None = None,
    spmd_axis_name: str | Sequence[str] | Shards | None = None,
    method: str = "per_example",
    arithmetic: str | Arithmetic | None = None,
) -> BoundedSensitivityCallable:
    """Makes a function that sums the clipped per-example gradients of `fun`.

    This function is like `jax.grad`, but it computes the gradient of each example of a
    batch, scales each gradient down to a norm of at most `l2_clip_norm`, and adds them
    up. The scaled gradient of one example is called its contribution.

    >>> def loss(w, x):
    ...     return 0.5 * jnp.mean((x - w) ** 2)
    >>> grad_fn = clipped_grad(loss, l2_clip_norm=3.5, return_grad_norms=True)
    >>> grad, sensitive = grad_fn(3.0, jnp.array([0.0, 7.0, -2.0]))
    >>> print(f"{grad:.4f}", sensitive.grad_norms)
    3.0000 [3. 4. 5.]

    To protect users with several examples each, use `keep_batch_dim=False` and one more
    axis in the batch. Here each user has two examples, and the gradient of the mean
    loss over these two is clipped.

    >>> user_grad_fn = clipped_grad(loss, l2_clip_norm=3.5, keep_batch_dim=False)
    >>> print(user_grad_fn(3.0, jnp.array([[1.0, -1.0], [2.0, 2.0], [0.0, 3.0]])))
    5.5

    Guarantees:
      The L2 sensitivity of the computed sum is at most `.sensitivity(relation)`: the
      sums of two neighbouring batches differ by no more than that. It is
      `l2_clip_norm / normalize_by` under add/remove and zero-out (one example is
      replaced by padding), and twice as much under replace-one. With
      `rescale_to_unit_norm` or `AutomaticClipping`, 1 stands in for `l2_clip_norm`.
      With a tree of clip norms, the norm of all of them does.

      Conditions:

      - `nan_safe` is True.
      - The gradient of an example depends on no other example (no batch statistics),
        and not on its place in the batch, not even in its last bits. (XLA does not
        promise the latter; see the guides.)
      - The key of `prng_argnum` is secret and is used once. Each place in the batch
        gets its own part of the key.
      - No `jax.vmap` is around this function. It would let the compiler compute a
        gradient twice and differently, once for the norm and once for the sum.

      Batches and devices:

      - An example contributes zero if it is padding, if its gradient is not finite, or
        if its squared norm overflows the dtype of the norm. The zero is selected and
        not the result of a product, so that NaN cannot pass.
      - The sum is zero for an empty batch and for a batch of padding only.
      - Values, norms and aux of an example depend on that example alone. They are
        sensitive.
      - `jax.jit` with sharded arguments works for all types of mesh axes. The gradient
        of an argument is sharded as this argument is.
      - `jax.shard_map` with `check_vma=False` works for sums of integers ("exact" and
        "bounded"), which `psum` may add. Without it, jax would add up gradients over
        devices before they are clipped, so that it is refused. Float sums are refused
        there, because the sensitivity does not cover the rounding of that addition. For
        the same reason, do not add up float sums of parts of a batch yourself; use
        `microbatch_size`.

      Rounding, by `arithmetic`:

      - "exact": each contribution is rounded to integers, and their norm is checked in
        integer arithmetic. A contribution above the bound is replaced by zero. The sum
        is the same, bit for bit, for any microbatch size, order of examples, padding
        and sharding, as long as the gradients are the same.
      - "float32" and "float64": the clip norm is lowered to cover rounding. Rounding of
        the norm takes about 1e-6 of it. Rounding of the sum takes 1/128 of it with
        "float32" and 2e-6 with "float64". These shares do not depend on the batch, and
        a batch that is too large for them is refused.
      - "bounded" (for `method="book_keeping"`): the sensitivity is proved for the
        computed bits (docs/proofs.md), as long as all other examples keep their places.
        So it does not hold under ADD_OR_REMOVE_ONE.
      - "unproved_float32" (for `method="book_keeping"`): the sensitivity is not proved.
        It holds up to ordinary rounding within a microbatch. The clip norm is lowered
        by 1/256 for bfloat16, and by more where the large terms of a gradient almost
        cancel. That was enough in every measurement, but gradients can be constructed
        for which it falls short, by less than half.

    Args:
      fun: returns a scalar loss, or (loss, aux) if `has_aux`. A
        `dpmp.loss_scaling.ScaledLoss` is multiplied by its scale before it is
        differentiated; all outputs are those of the unscaled loss. `fun` must be a pure
        function: a call with arrays compiles it once, as `jax.jit` does.
      argnums: the positions of the arguments to differentiate. These arguments have no
        example axis.
      has_aux: whether `fun` returns a pair.
      l2_clip_norm: the clip norm, or a tree of clip norms. The tree is a prefix of the
        gradient (with one argnum, of the gradient of that argument), and each number
        clips its own part. Each must be above 0; with `rescale_to_unit_norm`, 0 leaves
        the direction of each gradient. With this option, a single clip norm may be a
        traced float scalar, so that it can change during training without a new
        compilation. It must be public, for instance computed from noisy releases alone.
        If it is not from 1e-15 to 1e15, all contributions are zero.
        `AutomaticClipping` divides each gradient by its norm. For `AdaptiveClipNorm`
        (with `rescale_to_unit_norm`), `at(clip_norm)` sets the clip norm of a step, and
        the function returns a `JointSum`.
      rescale_to_unit_norm: whether to divide the clipped gradients by the clip norm (by
        the norm of all clip norms), so that it does not affect the learning rate.
      normalize_by: divides the sum: a public number that is fixed before the run,
        usually the expected batch size. The number of examples that were drawn is
        sensitive, and noise does not cover it.
      batch_argnums: the positions of the arguments with a leading example axis. The
        axis has the same size in all of them.
      keep_batch_dim: whether `fun` is given one example as a batch of one (True) or
        without that axis (False).
      return_values: whether to return the per-example losses, (B,).
      return_grad_norms: whether to return the norms before clipping, (B,), in float32
        or wider.
      released_metrics: adds coordinates for noisy metrics to the sum, which becomes a
        `JointSum`. `ReleasedMetrics` says what they cost.
      pre_clipping_transform: a function of the gradient of one example. Its output is
        clipped and summed in place of the gradient.
      microbatch_size: how many examples to process at a time, to limit memory. It must
        divide the batch size. Microbatches of padding only are skipped. None processes
        the whole batch at once with float sums. For "exact" and "bounded" sums, whose
        guarantee does not depend on the size, and without clipping, it chooses a
        divisor of the batch size when the loss is traced: on CPUs, one whose arrays fit
        into a cache; elsewhere, one whose arrays fit into memory. The choice depends on
        shapes alone.
      nan_safe: whether a gradient that is not finite contributes zero. Without it, NaN
        goes through, for debugging, and `.sensitivity()` is infinite.
      dtype: the dtype of a float sum, float32 (None) or float64.
      prng_argnum: the position of a random key that is split over the examples.
      spmd_axis_name: the axes of the mesh over which the examples are divided: a name,
        or several. Each device clips and sums its own examples, and only the sums are
        exchanged. The batch size and `microbatch_size` must be multiples of the number
        of these devices; a device processes its part of each microbatch. The mesh is
        that of `jax.set_mesh`. None leaves the division to jax, which sends the
        per-example gradients to all devices. For arrays on a mesh with explicit
        axes, None means the axes of the first axis of the batch. For parameters that
        are sharded over the same devices as the batch (FSDP), pass a
        `dpmp.clipping.Shards`, with which a device receives its own part of the sum.
      method: the gradient engine. "per_example" (vmap) materializes the per-example
        gradients. "book_keeping" caches activations and cotangents instead. It takes
        less time, and also less memory except for parameters that are wide or
        multiplied by few positions.
      arithmetic: how the sum is computed: "exact" (its leaves are `GridArray`, integers
        times a unit), "float32" (None) or "float64". With book-keeping: "bounded"
        (None; its leaves are `GridArray`) or "unproved_float32". On a grid, the largest
        contribution has 32767 units with "exact", and 2^22 with "bounded" sums. For
        another resolution, pass `dpmp.numerics.ExactSums(resolution)`, up to 2^22, or
        `BoundedSums(resolution)`, up to 2^24.

    Returns:
      A callable with the arguments of `fun` and the keyword `is_padding_example`, a
      (B,) bool array. It returns the sum, or (sum, AuxiliaryOutput) if `has_aux`,
      `return_values` or `return_grad_norms`. All other keyword arguments reach `fun`
      unchanged for every example. Values, norms and aux have a row for each example,
      which is 0 for padding. They have no noise: do not show or log them.

    Raises:
      ValueError: at construction if arguments are invalid or contradict each other.
        When called, before anything is differentiated, if the shapes or dtypes of the
        arguments do not fit, if `microbatch_size` does not divide the batch size, or if
        the batch is so large that the rounding of its sum is not covered.

    References:
      [Abadi et al.: Deep learning with differential privacy, algorithm
      1](https://arxiv.org/abs/1607.00133)
      [De et al.: Unlocking high-accuracy differentially private image classification,
      section 3 (rescaling)](https://arxiv.org/abs/2204.13650)
    """
    check_method(method, pre_clipping_transform)
    _validate.function(fun=fun)
    _validate.optional(_validate.function)(
        pre_clipping_transform=pre_clipping_transform
    )
    _validate.booleans(
        keep_batch_dim=keep_batch_dim,
        has_aux=has_aux,
        return_values=return_values,
        return_grad_norms=return_grad_norms,
        nan_safe=nan_safe,
    )
    sums = parse_arithmetic(arithmetic, method=method, dtype=dtype)
    loss_scale = None
    if isinstance(fun, ScaledLoss):
        fun, loss_scale = fun.fun, fun.loss_scale
        if pre_clipping_transform is not None:
            _validate.fail(
                "pre_clipping_transform must be given gradients without a loss_scale. "
                "Leave one of them out, or make the transform a part of the loss.",
                loss_scale=loss_scale,
            )
    joint = JointCoordinates.of(
        released_metrics,
        l2_clip_norm,
        rescale_to_unit_norm=rescale_to_unit_norm,
        nan_safe=nan_safe,
    )
    signature = Signature.parse(
        argnums=argnums,
        batch_argnums=batch_argnums,
        prng_argnum=prng_argnum,
        keep_batch_dim=keep_batch_dim,
        has_aux=has_aux,
    )
    if joint.adaptive:
        l2_clip_norm = joint.adaptive.initial
    clip_norms = ClipNorms.from_tree(l2_clip_norm, rescale_to_unit_norm, normalize_by)
    engine, fitting_microbatch = make_engine(
        fun,
        signature,
        method=method,
        is_bounded=sums.needs_norm_bounds,
        loss_scale=loss_scale,
        transform=_checked(pre_clipping_transform, clip_norms),
    )
    clipped_sum = ClippedSum(
        engine=engine,
        signature=signature,
        clip_norms=clip_norms,
        arithmetic=clip_norms.fit(sums, nan_safe),
        microbatch_size=microbatch_size,
        nan_safe=nan_safe,
        fitting_microbatch=fitting_microbatch,
        shards=Shards.parse(spmd_axis_name),
    )
    l2_norm_bound = clipped_sum.l2_norm_bound
    has_outputs = return_values or return_grad_norms or has_aux

    def select(total, outputs):
        total = joint.join(total, outputs, l2_norm_bound)
        chosen = AuxiliaryOutput(
            outputs.values if return_values else None,
            outputs.grad_norms if return_grad_norms else None,
            outputs.aux if has_aux else None,
        )
        return (total, chosen) if has_outputs else total

    return make_callable(
        clipped_sum,
        select,
        has_aux=has_outputs,
        has_params=pre_clipping_transform is None,
        l2_norm_bound=joint.norm_bound(l2_norm_bound),
        is_rebuilt_each_step=loss_scale is not None or clip_norms.traced is not None,
    )


def _checked(
    transform: Callable[[PyTree], PyTree] | None, clip_norms: ClipNorms
) -> Callable[[PyTree], PyTree] | None:
    """Makes the transform check its output; None stays None."""
    if transform is None:
        return None

    def checked(grads: PyTree) -> PyTree:
        grads = transform(grads)
        check_float_leaves(grads, "the output of pre_clipping_transform")
        clip_norms.check_prefix_of(grads)
        return grads

    return checked
