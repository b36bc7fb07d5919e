"""Loops over the microbatches of a batch and adds up their clipped gradients."""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp

from dpmp import _meshes, _validate
from dpmp._typing import PyTree
from dpmp.clipping import _clip_norms
from dpmp.clipping._clip_norms import ClipNorms
from dpmp.clipping._shards import Shards
from dpmp.engines import GradEngine, Signature
from dpmp.numerics import Arithmetic, reduction


class Outputs(NamedTuple):
    """The sensitive outputs of each example of a batch; zero for padding examples."""

    values: Any  # of the gradient engine; for losses, (B,)
    grad_norms: jax.Array  # before clipping, (B,)
    is_clipped: jax.Array  # whether a finite gradient was scaled down, (B,) bool
    is_example: jax.Array  # (B,) bool, False for padding
    aux: PyTree


@dataclass(frozen=True)
class ClippedSum:
    """A function that clips and sums the gradients of a batch; see `clipped_grad`."""

    engine: GradEngine
    signature: Signature  # of the engine
    clip_norms: ClipNorms
    arithmetic: Arithmetic  # for these clip norms
    microbatch_size: int | None
    nan_safe: bool
    shards: Shards
    # The size of microbatches, from the arguments of the engine, if none is given.
    fitting_microbatch: Callable[..., int] | None = None  # None for the whole batch

    def __post_init__(self):
        fix = "Use a divisor of the batch size, or None for the whole batch."
        check = partial(_validate.positive_integer, fix=fix)
        _validate.fields(self, microbatch_size=_validate.optional(check))

    @property
    def l2_norm_bound(self) -> float:
        """The largest norm of a contribution; infinite without `nan_safe`."""
        return self.clip_norms.l2_norm_bound if self.nan_safe else math.inf

    def __call__(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        is_padding_example: jax.Array | None,
    ) -> tuple[PyTree, Outputs]:
        """Returns the sum and the sensitive outputs of each example."""
        self.arithmetic.check_mode()
        if math.isfinite(self.l2_norm_bound):
            self.arithmetic.check_not_mapped()
        batch_size = self.signature.batch_size(args, is_padding_example)
        examples = self.signature.examples(args, batch_size)
        _meshes.check_types_without_axes(examples)

        def with_examples(examples):
            return [
                examples[i] if i in examples else jax.tree.map(_meshes.resharded, arg)
                for i, arg in enumerate(args)
            ]

        def one_microbatch(kwargs, examples, is_padding):
            others = jax.tree.map(_meshes.resharded, kwargs)
            return self._one_microbatch(with_examples(examples), others, is_padding)

        if batch_size % (self.microbatch_size or 1) != 0:
            _validate.fail(
                "microbatch_size must divide the batch size. Pad the batch, and mark "
                "the padding in is_padding_example.",
                microbatch_size=self.microbatch_size,
            )
        if batch_size == 0:
            total, outputs = _empty(partial(one_microbatch, kwargs), examples)
            return self.arithmetic.finish(total), outputs
        num_shards = self.shards.size
        part_size = batch_size // num_shards
        given = self.shards.divide(self.microbatch_size, batch_size)

        def sum_part(part, kwargs):
            examples, is_padding = part
            compute = partial(one_microbatch, kwargs)
            size = given or self._fitting(part_size, with_examples(examples), kwargs)
            if math.isfinite(self.clip_norms.l2_norm_bound):
                self.arithmetic.check_batch(batch_size, size * num_shards, num_shards)
            if size == part_size:
                return compute(examples, is_padding)
            return self._scan(compute, examples, is_padding, size)

        batch = (examples, is_padding_example)
        total, outputs = self.shards.sum(sum_part, batch, kwargs, self.arithmetic)
        return self.arithmetic.finish(total), outputs

    def divided_like(self, args: Sequence[Any]) -> "ClippedSum":
        """The same sum, divided over explicit axes as the batch in `args` is."""
        batch = [args[i] for i in self.signature.batch_argnums if i < len(args)]
        first = next((x for x in jax.tree.leaves(batch) if _meshes.is_explicit(x)), 0)
        axes = _meshes.axes_of_rows(first)
        if self.shards.axes or not axes:
            return self
        return replace(self, shards=replace(self.shards, axes=axes))

    def size_of_microbatches(self, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
        """How many examples a device processes at a time."""
        batch_size = self.signature.batch_size(args)
        examples = self.signature.examples(args, batch_size)
        args = [examples.get(i, arg) for i, arg in enumerate(args)]
        part_size = batch_size // self.shards.size
        given = self.shards.divide(self.microbatch_size, batch_size)
        return given or self._fitting(part_size, args, kwargs)

    def _fitting(
        self, batch_size: int, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> int:
        """The size of microbatches where none is given, for arguments of the engine."""
        # The rounding of float sums, which the guarantee covers, depends on the size.
        is_clipped = math.isfinite(self.clip_norms.l2_norm_bound)
        is_clipped_in_floats = is_clipped and self.arithmetic.resolution is None
        if self.fitting_microbatch is None or is_clipped_in_floats:
            return batch_size
        fitting = self.fitting_microbatch(*args, **kwargs)
        return reduction.largest_divisor(batch_size, fitting)

    def _one_microbatch(
        self, args: Sequence[Any], kwargs: dict[str, Any], is_padding: jax.Array | None
    ) -> tuple[PyTree, Outputs]:
        grads = self.engine(*args, **kwargs)
        norms = grads.squared_norms(self.clip_norms.prefix)
        norm = _clip_norms.global_norm(norms)
        targets = self.arithmetic.targets(
            self.clip_norms.targets, [x.num_entries for x in norms]
        )
        coefs = _clip_norms.coefficients(targets, norms, self.clip_norms.stability)
        total = grads.weighted_sum(
            coefs,
            keep_mask(norm, coefs, is_padding, self.nan_safe),
            self.clip_norms.prefix,
            self.arithmetic,
        )
        outputs = Outputs(
            values=grads.values,
            grad_norms=norm,
            is_clipped=_clip_norms.are_clipped(targets, coefs) & jnp.isfinite(norm),
            is_example=jnp.full(norm.shape, True),
            aux=grads.aux,
        )
        return total, _zero_padding(outputs, is_padding)

    def _scan(
        self,
        one_microbatch: Callable[..., Any],
        examples: PyTree,
        is_padding: jax.Array | None,
        size: int,
    ) -> tuple[PyTree, Any]:
        """Sums one microbatch after another, and skips microbatches of padding only."""
        microbatches = jax.tree.map(
            lambda x: x.reshape(x.shape[0] // size, size, *x.shape[1:]),
            (examples, is_padding),
        )
        one_microbatch = jax.jit(one_microbatch)  # jit traces it only once
        first = jax.tree.map(lambda x: x[0], microbatches)
        zeros = _zeros(jax.eval_shape(one_microbatch, *first))

        def step(total, microbatch):
            def compute():
                part, outputs = one_microbatch(*microbatch)
                return jax.tree.map(operator.add, total, part), outputs

            if is_padding is None:
                return compute()
            is_empty = self.shards.agree(jnp.all(microbatch[1]))
            return jax.lax.cond(is_empty, lambda: (total, zeros[1]), compute)

        total, outputs = jax.lax.scan(step, zeros[0], microbatches)
        return total, jax.tree.map(
            lambda x: x.reshape(x.shape[0] * size, *x.shape[2:]), outputs
        )


def _empty(
    one_microbatch: Callable[..., Any], examples: PyTree
) -> tuple[PyTree, Outputs]:
    """Returns zeros in the shapes of an empty batch."""
    one_example = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), examples
    )
    total, outputs = _zeros(jax.eval_shape(one_microbatch, one_example, None))
    return total, jax.tree.map(lambda x: x[:0], outputs)


def _zeros(shapes: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def keep_mask(
    global_norm: jax.Array,
    coefs: Sequence[jax.Array],
    is_padding: jax.Array | None,
    nan_safe: bool,
) -> jax.Array:
    """Whether each example contributes to the sum, (B,) bool."""
    keep = jnp.full(global_norm.shape, True)
    if nan_safe:
        finite = map(jnp.isfinite, (global_norm, *coefs))
        keep = functools.reduce(jnp.logical_and, finite)
    return keep if is_padding is None else keep & ~is_padding


def _zero_padding(outputs: PyTree, is_padding: jax.Array | None) -> PyTree:
    if is_padding is None:
        return outputs
    return jax.tree.map(
        lambda x: jnp.where(
            is_padding.reshape(-1, *[1] * (x.ndim - 1)), jnp.zeros_like(x), x
        ),
        outputs,
    )
