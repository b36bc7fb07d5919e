"""Loops over the microbatches of a batch and adds up their clipped gradients."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.clipping import _clip_norms
from dpmp.clipping._clip_norms import ClipNorms
from dpmp.engines._interface import GradEngine
from dpmp.engines._signature import Signature
from dpmp.numerics._arithmetic import Arithmetic
from dpmp.numerics._sums import is_sum


class Outputs(NamedTuple):
    """The sensitive outputs of each example of a batch; zero for padding examples.

    Attributes:
      values: the values of the gradient engine; for losses, (B,).
      grad_norms: the norms before clipping, (B,).
      is_clipped: whether a finite gradient was scaled down in any group, (B,) bool.
      aux: the auxiliary outputs.
    """

    values: Any
    grad_norms: jax.Array
    is_clipped: jax.Array
    aux: PyTree


@dataclass(frozen=True)
class ClippedSum:
    """A function that clips and sums the gradients of a batch.

    Attributes:
      engine: computes the per-example gradients of a microbatch.
      signature: the signature of the engine.
      clip_norms: the clip norms of the gradients.
      arithmetic: the arithmetic of the sum, for these clip norms.
      microbatch_size: how many examples the engine sees at a time. None is the whole
        batch, or as many as `largest_microbatch` allows.
      nan_safe: whether a gradient that is not finite contributes zero.
      largest_microbatch: a function from the arguments of the engine to the largest
        microbatch that is used without a `microbatch_size`; None for no limit.
    """

    engine: GradEngine
    signature: Signature
    clip_norms: ClipNorms
    arithmetic: Arithmetic
    microbatch_size: int | None
    nan_safe: bool
    largest_microbatch: Callable[..., int] | None = None

    def __post_init__(self):
        if self.microbatch_size is not None:
            size = _validate.positive_integer(
                microbatch_size=self.microbatch_size,
                fix="Use a divisor of the batch size, or None for the whole batch.",
            )
            object.__setattr__(self, "microbatch_size", size)

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
        batch_size = self._check_batch(args, is_padding_example)
        examples = self.signature.examples(args, batch_size)

        def call_args(examples):
            return [examples.get(i, arg) for i, arg in enumerate(args)]

        def one_microbatch(examples, is_padding):
            return self._one_microbatch(call_args(examples), kwargs, is_padding)

        size = self.microbatch_size or batch_size
        if self.microbatch_size is None and self.largest_microbatch and batch_size:
            largest = self.largest_microbatch(*call_args(examples), **kwargs)
            size = largest_divisor(batch_size, largest)
        if math.isfinite(self.clip_norms.l2_norm_bound):
            self.arithmetic.check_batch(batch_size, size)

        if batch_size == 0:
            total, outputs = self._empty(one_microbatch, examples)
        elif size == batch_size:
            total, outputs = one_microbatch(examples, is_padding_example)
        else:
            total, outputs = self._scan(
                one_microbatch, examples, is_padding_example, size
            )
        return self.arithmetic.finish(total), outputs

    def _one_microbatch(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        is_padding: jax.Array | None,
    ) -> tuple[PyTree, Outputs]:
        grads = self.engine(*args, **kwargs)
        norms = grads.squared_norms(self.clip_norms.prefix)
        global_norm = _clip_norms.global_norm(norms)
        targets = self.arithmetic.targets(
            self.clip_norms.targets, [norm.num_entries for norm in norms]
        )
        coefs = _clip_norms.coefficients(targets, norms)
        total = grads.weighted_sum(
            coefs,
            keep_mask(global_norm, coefs, is_padding, self.nan_safe),
            self.clip_norms.prefix,
            self.arithmetic,
        )
        is_clipped = _clip_norms.are_clipped(targets, coefs) & jnp.isfinite(global_norm)
        outputs = Outputs(grads.values, global_norm, is_clipped, grads.aux)
        return total, _zero_padding(outputs, is_padding)

    def _scan(
        self,
        one_microbatch: Callable[..., Any],
        examples: PyTree,
        is_padding: jax.Array | None,
        size: int,
    ) -> tuple[PyTree, Any]:
        """Sums one microbatch after another, and skips those of padding only."""
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
                return self._add(total, part), outputs

            if is_padding is None:
                return compute()
            return jax.lax.cond(
                jnp.all(microbatch[1]), lambda: (total, zeros[1]), compute
            )

        total, outputs = jax.lax.scan(step, zeros[0], microbatches)
        return total, jax.tree.map(
            lambda x: x.reshape(x.shape[0] * size, *x.shape[2:]), outputs
        )

    def _add(self, a: PyTree, b: PyTree) -> PyTree:
        return jax.tree.map(self.arithmetic.add, a, b, is_leaf=is_sum)

    def _empty(
        self, one_microbatch: Callable[..., Any], examples: PyTree
    ) -> tuple[PyTree, Any]:
        """Returns zeros in the shapes that a batch without examples has."""
        one_example = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), examples
        )
        total, outputs = jax.eval_shape(one_microbatch, one_example, None)
        return _zeros(total), jax.tree.map(lambda x: x[:0], _zeros(outputs))

    def _check_batch(
        self, args: Sequence[Any], is_padding_example: jax.Array | None
    ) -> int:
        """Returns the batch size; raises ValueError if a size does not fit."""
        batch_size = self.signature.batch_size(args, is_padding_example)
        _validate.require(
            batch_size % (self.microbatch_size or 1) == 0,
            "microbatch_size must divide the batch size",
            microbatch_size=self.microbatch_size,
            batch_size=batch_size,
            fix="Pad the batch, and mark the padding in is_padding_example.",
        )
        return batch_size


def largest_divisor(batch_size: int, limit: int) -> int:
    """The largest microbatch size of at most `limit` that divides the batch size."""
    sizes = range(1, min(batch_size, limit) + 1)
    return max(size for size in sizes if batch_size % size == 0)


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


def _zeros(shapes: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def specs_of_sum(total: PyTree, params: Sequence[jax.P]) -> list[jax.P]:
    """Partition specs for a sum: those of the parameters, and replicated otherwise."""
    leaves = jax.tree.leaves(total, is_leaf=is_sum)
    specs = [*params[: len(leaves)], *[jax.P()] * (len(leaves) - len(params))]
    return [
        spec
        for leaf, spec in zip(leaves, specs, strict=True)
        for _ in jax.tree.leaves(leaf)
    ]


def specs_of_examples(outputs: PyTree, batch: PyTree) -> list[jax.P]:
    """Partition specs for per-example outputs, from those of the batch."""
    axis = jax.tree.leaves(batch)[0][:1]
    return [jax.P(*axis)] * len(jax.tree.leaves(outputs))
