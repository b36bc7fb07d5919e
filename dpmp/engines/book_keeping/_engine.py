"""The book-keeping engine: norms and clipped sums from activations and cotangents.

One forward pass caches the activation that enters every use of a parameter, and one
backward pass caches the cotangent of its output (Bu et al., 2022). A per-example
gradient is materialized in three cases only: it is smaller than these arrays, it is the
fastest way to the norm, or no other exact way is known (`_choice`).
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from dpmp import _validate
from dpmp._fence import materialize
from dpmp._typing import PyTree
from dpmp.engines._signature import Signature, check_loss
from dpmp.engines.book_keeping import _choice, _linalg, _norms, _uses, _views
from dpmp.engines.book_keeping._norms import NormMethod
from dpmp.engines.book_keeping._plan import Plan, execute, make_plan
from dpmp.engines.book_keeping._uses import Cached, Use
from dpmp.numerics import (
    Arithmetic,
    PartialSums,
    Roundings,
    SquaredNorm,
    at_least_float32,
    group_size,
    norm_bound_for_clipping,
)
from dpmp.programs import (
    analysis,
    frozen,
    interpreter,
    primitives,
    transformations,
)

# Unproved sums do not count roundings. They assume these squared errors of norms and
# sums, relative to the squared sum of magnitudes. The first is a few times the largest
# error that was measured. The second covers rounding all factors to bfloat16 once.
_ERROR, _BFLOAT16_ERROR = 2.0**-22, 2.0**-16


@dataclass(frozen=True)
class Program:
    """The analysis of a loss, made before the loss is evaluated.

    Attributes:
      plan: the plan for a function of the parameters and one example. Its uses have the
        forms that their rules give, and determine the estimates of flops.
      cached_uses: the uses that determine the cached arrays: dense if the backward pass
        materializes the gradient.
      uses: the uses for norms and sums: dense for every gradient that is stored.
      shapes: the shapes of the parameters.
      norm_methods: the norm methods of all parameters, with the numbers of their uses.
      params_read: the numbers of the parameters whose values the loss reads. It reads
        parts that devices have of the others.
      aux_treedef: the tree structure of the auxiliary outputs.
      is_bounded: whether to clip by proved upper bounds.
    """

    plan: Plan
    cached_uses: list[Use]
    uses: list[Use]
    shapes: list[tuple[int, ...]]
    norm_methods: list[NormMethod]
    params_read: list[int]
    aux_treedef: Any
    is_bounded: bool


def analyse(
    fun: Callable[[PyTree, PyTree], tuple[Any, PyTree]],
    params: PyTree,
    example: PyTree,
    *,
    is_bounded: bool = False,
) -> Program:
    """Finds the uses of `fun(params, example)`, and how to compute norms from them.

    `params` and `example` may hold arrays or shapes. With `is_bounded`, the errors of
    all norms must be known. So parameters that are used through arithmetic get an
    identity tap (see `_steps`).
    """
    closed, treedef = interpreter.trace(fun, params, example)
    if analysis.has_primitive(closed.jaxpr, primitives.REFERENCE):
        _validate.fail(
            "a loss for book-keeping must not use jax.new_ref. Use "
            'method="per_example".'
        )
    if analysis.has_primitive(closed.jaxpr, primitives.RAGGED_DOT):
        fun = transformations.without_ragged_products(fun)
        closed, treedef = interpreter.trace(fun, params, example)
    if transformations.has_complex_products(closed.jaxpr):
        fun = transformations.without_complex_products(fun)
        closed, treedef = interpreter.trace(fun, params, example)
    avals, num_params = closed.in_avals, len(jax.tree.leaves(params))
    shapes = [aval.shape for aval in avals[:num_params]]
    inputs = [
        _views.make_root(i, aval, is_param=True) if i < num_params else None
        for i, aval in enumerate(avals)
    ]
    aux = range(1, len(closed.out_avals))
    plan = make_plan(closed, inputs, unread=aux)
    if is_bounded and (some := _choice.used_through_arithmetic(plan.uses, shapes)):
        plan = make_plan(closed, inputs, unread=aux, tapped=some)
        assert not _choice.used_through_arithmetic(plan.uses, shapes)
    methods = _choice.choose(plan.uses, shapes)
    stored = {method.uses[0] for method in methods if method.form == "stored"}
    early = {i for i in stored if _choice.is_materialized_early(plan.uses[i])}
    cached_uses, uses = (
        [_uses.dense(use) if i in some else use for i, use in enumerate(plan.uses)]
        for some in (early, stored)
    )
    return Program(
        plan=plan,
        cached_uses=cached_uses,
        uses=uses,
        shapes=shapes,
        norm_methods=methods,
        params_read=sorted(frozen.args_read(closed) & {*range(num_params)}),
        aux_treedef=treedef.children()[1],
        is_bounded=is_bounded,
    )


@dataclass(frozen=True)
class Engine:
    """A `GradEngine` that differentiates a loss for the examples of a batch.

    `fun` takes the arguments of one example and returns (loss, aux). With `is_bounded`,
    clipping is by proved upper bounds (`dpmp.numerics._bounded`).
    """

    fun: Callable[..., tuple[Any, PyTree]]
    signature: Signature
    is_bounded: bool

    def __call__(self, *args: Any, **kwargs: Any) -> "BookKeptGrads":
        """Returns the gradients of the examples of a batch."""
        program = self.analyse(args, kwargs)
        params = jax.tree.map(jnp.asarray, self.signature.params(args))
        compute = _linalg.adapted(
            jax.vmap(functools.partial(_one_example, program), in_axes=(None, 0))
        )
        examples = {i: args[i] for i in self.signature.of_examples}
        inputs = jax.tree.leaves(params), jax.tree.leaves(examples)
        inputs_read = [inputs[0][i] for i in program.params_read], inputs[1]

        def compute_and_cache() -> tuple[Any, PyTree, list[Cached]]:
            values, aux, cached = compute(*inputs)
            uses = zip(program.cached_uses, program.uses, cached, strict=True)
            cached = [
                x if old.outer is new.outer else _choice.store_gradient(old, x)
                for old, new, x in uses
            ]
            return values, aux, cached

        values, aux, cached = materialize(compute_and_cache, (inputs_read, kwargs))
        return BookKeptGrads(values, aux, program, params, cached)

    def analyse(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Program:
        """Analyses the loss of one example, from the shapes of a batch."""
        of_one_example = self.signature.for_one_example(self.fun, args, kwargs)
        return analyse(*of_one_example, is_bounded=self.is_bounded)


def make_engine(
    fun: Callable[..., Any],
    args: Sequence[Any],
    *,
    is_bounded: bool = True,
    **roles: Any,
) -> tuple[Engine, int]:
    """Makes the engine of a loss as users write it; returns the batch size too.

    Raises ValueError for invalid roles and for arguments that do not fit them.
    """
    signature = Signature.parse(**roles)
    signature.check(args)
    loss_fn = signature.of_one_example(fun, check_loss)
    return Engine(loss_fn, signature, is_bounded), signature.batch_size(args)


def _one_example(
    program: Program, params: list[Any], example: list[Any]
) -> tuple[Any, PyTree, list[Cached]]:
    """Returns the loss, the auxiliary outputs, and the cached arrays of each use."""
    materialized = [use.outer is None for use in program.cached_uses]

    def tapped(dummies: list[jax.Array]) -> Any:
        values = [*params, *example]
        outputs, activations = execute(program.plan, values, dummies, materialized)
        return outputs[0], (outputs[1:], activations)

    # Zeros, which only receive the cotangents of the uses.
    shapes = [use.cotangent for use in program.cached_uses]
    dummies = [jnp.zeros(x.shape, x.dtype) for x in shapes]
    value, vjp, (aux, activations) = jax.vjp(tapped, dummies, has_aux=True)
    (cotangents,) = vjp(jnp.ones_like(value))
    aux = jax.tree.unflatten(program.aux_treedef, aux)
    return value, aux, list(map(Cached, activations, cotangents))


class Group(NamedTuple):
    """The squared norms of a clipping group, (B,), and numbers that bound their errors.

    `magnitudes` has squared sums of magnitudes (`_norms`). `cancelling` is the part
    from gradients that are not in memory. The norm or the sum of these gradients may be
    small although it is computed from much larger numbers, which cancel.
    """

    squared_norm: jax.Array
    magnitudes: jax.Array
    cancelling: jax.Array
    roundings: Roundings
    num_products: int
    num_entries: int


@dataclass(frozen=True)
class BookKeptGrads:
    """`PerExampleGrads` as the cached activations and cotangents of each use."""

    values: jax.Array
    aux: PyTree
    program: Program
    params: PyTree
    cached: list[Cached]

    def squared_norms(self, prefix: Any) -> list[SquaredNorm]:
        """See `PerExampleGrads`; the bounds to clip by include a rounding reserve."""
        return [self._squared_norm(x) for x in self.measure(self._groups(prefix))]

    def measure(self, groups: Sequence[Sequence[int]]) -> list["Group"]:
        """Computes the norms and sums of magnitudes of groups of parameters."""
        methods = self.program.norm_methods
        measured = [_norms.measure(x, self._roots, self.cached) for x in methods]
        dtype = at_least_float32(*(x.dtype for x in jax.tree.leaves(measured)))

        def of_group(group: Sequence[int]) -> Group:
            parts = [
                (method, x)
                for method, of_params in zip(methods, measured, strict=True)
                for root, x in zip(method.params, of_params, strict=True)
                if root in group
            ]
            roundings = functools.reduce(
                Roundings.at_least, (x.roundings for x, _ in parts), Roundings()
            )
            # There may be no part, so each list gets a zero, in the widest dtype.
            zero = jnp.zeros((*self.values.shape, 1), dtype)
            squares = _linalg.joined([zero, *(x.norm for _, x in parts)])
            magnitudes = _linalg.joined([zero, *(x.magnitudes for _, x in parts)])
            of_cancelling = (x.magnitudes for method, x in parts if method.cancels)
            cancelling = _linalg.joined([zero, *of_cancelling])
            depth = _linalg.depth(max(squares.shape[-1], magnitudes.shape[-1]))
            return Group(
                # Inner products that cancel may add up to less than zero.
                jnp.maximum(_linalg.add_up(squares), 0),
                _linalg.add_up(magnitudes),
                _linalg.add_up(cancelling),
                roundings.after(depth),
                sum(method.num_products for method, _ in parts),
                sum(math.prod(self.program.shapes[i]) for i in group),
            )

        return list(map(of_group, groups))

    def _squared_norm(self, group: "Group") -> SquaredNorm:
        # A factor times a coefficient is rounded to bfloat16 if the factors are.
        outer = (use for use in self.program.uses if use.outer is not None)
        is_narrow = any(use.cotangent.dtype == jnp.bfloat16 for use in outer)
        folding_error = 2.0**-8 if is_narrow else 2.0**-22
        if self.program.is_bounded:
            bound = norm_bound_for_clipping(
                group.squared_norm,
                group.magnitudes,
                group.roundings,
                group_size=self._group_size,
                num_terms=group.num_products,
                folding_error=folding_error,
            )
        else:
            error = _BFLOAT16_ERROR if is_narrow else _ERROR
            square = group.squared_norm + error * group.cancelling
            bound = jnp.sqrt(square) * (1 + folding_error)
        return SquaredNorm(group.squared_norm, 0, group.num_entries, jnp.square(bound))

    def weighted_sum(
        self,
        clip_coefs: list[jax.Array],
        keep: jax.Array,
        prefix: Any,
        arithmetic: Arithmetic,
    ) -> PyTree:
        """See `PerExampleGrads`."""
        sums_of = cast("PartialSums", arithmetic)  # enforced by `parse`
        # All uses must read the same bits, whatever else reads the coefficients.
        coefs, keep = materialize(lambda: (clip_coefs, keep), (clip_coefs, keep))
        leaves, treedef = jax.tree.flatten(self.params)

        def sum_group(examples: Any) -> list[PyTree]:
            cached, coefs, keep = examples
            sums: dict[int, jax.Array] = {}
            for group, coef in zip(self._groups(prefix), coefs, strict=True):
                sums |= _uses.weighted_sum(
                    self.program.uses, group, self._roots, cached, coef, keep
                )
            return [sums_of.from_float(sums[i]) for i in range(len(leaves))]

        examples = self.cached, coefs, keep
        largest = max(map(math.prod, self.program.shapes))
        return treedef.unflatten(
            _uses.over_groups(sum_group, examples, self._group_size, largest)
        )

    @property
    def _group_size(self) -> int:
        """How many examples are summed in floats: all, but for "bounded" sums."""
        (batch_size,) = self.values.shape
        if not self.program.is_bounded:
            return batch_size
        methods = self.program.norm_methods
        positions = (x.roundings.positions for x in methods)
        return group_size(batch_size, max(positions, default=1))

    @property
    def _roots(self) -> dict[int, Any]:
        return dict(enumerate(jax.tree.leaves(self.params)))

    def _groups(self, prefix: Any) -> list[list[int]]:
        """Lists the parameters of each clipping group."""
        leaves, treedef = jax.tree.flatten(self.params)
        numbers = treedef.unflatten(range(len(leaves)))
        return [jax.tree.leaves(group) for group in prefix.flatten_up_to(numbers)]
