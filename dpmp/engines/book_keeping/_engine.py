"""The book-keeping engine: per-example norms and clipped sums without the gradients.

One forward pass records the input of every site, and one backward pass records the
cotangent of its output (Bu et al., 2022). The engine forms a per-example gradient in
two cases only: the gradient is smaller than the recorded values, or no other exact way
is known.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from dpmp._fence import behind_a_branch
from dpmp._typing import PyTree
from dpmp.engines._signature import Signature, without_example_axis
from dpmp.engines.book_keeping import (
    _kept,
    _norms,
    _products,
    _sums,
    _terms,
    _totals,
    _views,
)
from dpmp.engines.book_keeping._gradients import Recorded
from dpmp.engines.book_keeping._norms import Term
from dpmp.engines.book_keeping._plan import Plan, execute, make_plan
from dpmp.engines.book_keeping._sites import Site
from dpmp.engines.book_keeping._views import View
from dpmp.numerics._arithmetic import Arithmetic, PartialSums
from dpmp.numerics._bounded import Roundings, clip_by, largest_microbatch
from dpmp.numerics._squared_norms import SquaredNorm
from dpmp.numerics._stored import at_least_float32
from dpmp.programs import _interpreter

# Unproved sums do not count roundings. These are the squared errors of norms and sums,
# relative to the squared extent. The first is a few times the largest error that was
# measured. The second is what one rounding of all factors to bfloat16 can cause.
_ERROR, _BFLOAT16_ERROR = 2.0**-22, 2.0**-16


@dataclass(frozen=True)
class Program:
    """The analysis of a loss, made before the loss is evaluated.

    Attributes:
      plan: the plan for the loss of one example, a function of parameters and the
        example.
      params: the roots that are parameters.
      terms: the terms of the squared norms of `params`.
      sites: the sites of the plan. A site whose gradient is kept appears as a dense
        one.
      aux_treedef: the tree structure of the auxiliary outputs.
      is_bounded: whether to clip by proved upper bounds.
    """

    plan: Plan
    params: list[View]
    terms: list[Term]
    sites: list[Site]
    aux_treedef: Any
    is_bounded: bool

    def dummies(self) -> list[jax.Array]:
        """Returns a zero array for each site, to receive the site's cotangent."""
        shapes = (site.cotangent for site in self.plan.sites)
        return [jnp.zeros(x.shape, x.dtype) for x in shapes]


def analyse(
    fun: Callable[[PyTree, PyTree], tuple[Any, PyTree]],
    params: PyTree,
    example: PyTree,
    *,
    is_bounded: bool = False,
) -> Program:
    """Finds the sites of a loss, and how to compute norms from them.

    Args:
      fun: `fun(params, example)` returns the loss and auxiliary outputs.
      params: arrays or their shapes.
      example: arrays or their shapes, for one example.
      is_bounded: whether the errors of all norms must be known. If so, parameters on
        which the loss does arithmetic before they meet data are tapped whole (see
        `_rules`).
    """
    closed, treedef = _interpreter.trace(fun, params, example)
    avals = closed.in_avals
    num_params = len(jax.tree.leaves(params))
    roots = [
        _views.make_root(i, aval, is_param=True)
        for i, aval in enumerate(avals[:num_params])
    ]
    inputs = [*roots, *[None] * (len(avals) - num_params)]
    aux = range(1, len(closed.out_avals))
    plan = make_plan(closed, inputs, unread=aux)
    if is_bounded and (tangled := _terms.tangled_params(plan.sites, roots)):
        plan = make_plan(closed, inputs, tapped=tangled, unread=aux)
        assert not _terms.tangled_params(plan.sites, roots)
    program = Program(plan, roots, [], [], treedef.children()[1], is_bounded)
    _, records = jax.eval_shape(
        lambda *args: execute(plan, args, program.dummies()), *avals
    )
    terms = _terms.make_terms(plan.sites, roots, records)
    sites = _kept.dense_if_kept(terms, plan.sites)
    return dataclasses.replace(program, terms=terms, sites=sites)


@dataclass(frozen=True)
class Engine:
    """A `GradEngine` that differentiates a loss for the examples of a batch.

    Attributes:
      fun: takes the arguments of one example and returns (loss, aux).
      signature: the signature of `fun`.
      is_bounded: whether to clip by proved upper bounds; see `dpmp.numerics._bounded`.
      spmd_axis_name: as in `jax.vmap`.
    """

    fun: Callable[..., tuple[Any, PyTree]]
    signature: Signature
    is_bounded: bool
    spmd_axis_name: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> "BookKeptGrads":
        """Returns the gradients of the examples of a batch."""
        params = [jax.tree.map(jnp.asarray, args[i]) for i in self.signature.of_params]
        examples = {i: args[i] for i in self.signature.of_examples}
        example = jax.tree.map(without_example_axis, examples)
        program = self.analyse(params, example, args, kwargs)
        leaves = jax.tree.leaves(params)
        compute = _products.adapted(
            jax.vmap(
                functools.partial(_one_example, program),
                in_axes=(None, 0),
                spmd_axis_name=self.spmd_axis_name,
            )
        )

        def compute_and_keep() -> tuple[Any, PyTree, Recorded]:
            values, aux, recorded = compute(leaves, jax.tree.leaves(examples))
            return values, aux, _kept.keep(program.terms, program.plan.sites, recorded)

        values, aux, recorded = behind_a_branch(compute_and_keep, (args, kwargs))
        is_single = isinstance(self.signature.argnums, int)
        tree = params[0] if is_single else tuple(params)
        return BookKeptGrads(values, aux, program, tree, recorded)

    def largest_microbatch(self, *args: Any, **kwargs: Any) -> int:
        """Returns the largest microbatch size of "bounded" sums, from shapes alone."""
        params = [args[i] for i in self.signature.of_params]
        example = {
            i: jax.tree.map(without_example_axis, args[i])
            for i in self.signature.of_examples
        }
        terms = self.analyse(params, example, args, kwargs).terms
        return largest_microbatch(max(term.roundings.positions for term in terms))

    def analyse(
        self,
        params: Sequence[Any],
        example: dict[int, Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Program:
        """Analyses the loss of one example.

        Args:
          params: for each position of parameters, arrays or shapes.
          example: the shapes of the arguments that differ between examples, by
            position.
          args: all positional arguments. Those that are neither parameters nor examples
            are constants of the loss.
          kwargs: the keyword arguments, which are constants of the loss too.
        """

        def of_one_example(params: Sequence[Any], example: dict[int, Any]) -> Any:
            given = dict(enumerate(args))
            given |= zip(self.signature.of_params, params, strict=True)
            return self.fun(*(given | example).values(), **kwargs)

        return analyse(of_one_example, params, example, is_bounded=self.is_bounded)


def _one_example(
    program: Program, params: list[Any], example: list[Any]
) -> tuple[Any, PyTree, Recorded]:
    """Returns the loss, auxiliary outputs, and the recorded values and cotangents."""

    def tapped(dummies: list[jax.Array]) -> Any:
        outputs, records = execute(program.plan, [*params, *example], dummies)
        return outputs[0], (outputs[1:], records)

    value, vjp, (aux, records) = jax.vjp(tapped, program.dummies(), has_aux=True)
    (cotangents,) = vjp(jnp.ones_like(value))
    aux = jax.tree.unflatten(program.aux_treedef, aux)
    return value, aux, (records, cotangents)


class Group(NamedTuple):
    """The measured gradients of a clipping group.

    Attributes:
      squared_norm: the squared norms, (B,).
      extent: the squared extents, (B,); see `dpmp.numerics._bounded`.
      cancelling: the part of `extent` from gradients that are not in memory, (B,). The
        norm or the sum of these gradients may be the small rest of much larger numbers
        that cancel.
      roundings: the counts of roundings in these numbers.
      num_products: the number of products that the squared norm is a sum of.
      num_entries: the number of entries of the parameters.
    """

    squared_norm: jax.Array
    extent: jax.Array
    cancelling: jax.Array
    roundings: Roundings
    num_products: int
    num_entries: int


@dataclass(frozen=True)
class BookKeptGrads:
    """`PerExampleGrads` without the gradients themselves.

    Attributes:
      values: per-example losses, (B,).
      aux: per-example auxiliary outputs, with leaves of shape (B, ...).
      program: the program that was run.
      params: the parameters.
      recorded: the values and cotangents of all sites, with a leading example axis.
    """

    values: jax.Array
    aux: PyTree
    program: Program
    params: PyTree
    recorded: Recorded

    def squared_norms(self, prefix: Any) -> list[SquaredNorm]:
        """See `PerExampleGrads`; the bounds to clip by leave room for rounding."""
        return [self._squared_norm(x) for x in self.measure(self._groups(prefix))]

    def measure(self, groups: Sequence[Sequence[int]]) -> list["Group"]:
        """Measures the norms and extents of groups of parameters."""
        terms = self.program.terms
        measured = _norms.measure_all(terms, self._roots, self.recorded)
        dtype = at_least_float32(*(x.dtype for x in jax.tree.leaves(measured)))
        results = []
        for group in groups:
            parts = [
                (term, x)
                for term, of_params in zip(terms, measured, strict=True)
                for root, x in zip(term.params, of_params, strict=True)
                if root in group
            ]
            roundings = functools.reduce(
                Roundings.at_least, (term.roundings for term, _ in parts), Roundings()
            )
            squares = [x.squared_norm for _, x in parts]
            extents = [x.extent for _, x in parts]
            cancelling = [x.extent for term, x in parts if term.cancels]
            # The lists may be empty, so each gets a zero, in the widest dtype of all.
            zero = jnp.zeros((*self.values.shape, 1), dtype)
            squares, extents, cancelling = (
                _totals.joined([zero, *some]) for some in (squares, extents, cancelling)
            )
            depth = _totals.depth(max(squares.shape[-1], extents.shape[-1]))
            results.append(
                Group(
                    # Inner products that cancel may add up to less than zero.
                    jnp.maximum(_totals.add_up(squares), 0),
                    _totals.add_up(extents),
                    _totals.add_up(cancelling),
                    roundings.after(depth),
                    sum(term.num_products for term, _ in parts),
                    sum(math.prod(self.program.params[i].aval.shape) for i in group),
                )
            )
        return results

    def _squared_norm(self, group: "Group") -> SquaredNorm:
        if self.program.is_bounded:
            bound = clip_by(
                group.squared_norm,
                group.extent,
                group.roundings,
                num_terms=group.num_products,
                folding_error=self._folding_error,
            )
        else:
            error = _BFLOAT16_ERROR if self._rounds_factors else _ERROR
            square = group.squared_norm + error * group.cancelling
            bound = jnp.sqrt(square) * (1 + self._folding_error)
        return SquaredNorm(group.squared_norm, 0, group.num_entries, jnp.square(bound))

    @property
    def _folding_error(self) -> float:
        """The relative rounding error of a factor times a coefficient."""
        return 2.0**-8 if self._rounds_factors else 2.0**-22

    @property
    def _rounds_factors(self) -> bool:
        """Whether a factor times a coefficient is rounded to bfloat16."""
        cotangents = (x.cotangent for x in self.program.sites if x.outer)
        return any(x.dtype == jnp.bfloat16 for x in cotangents)

    def weighted_sum(
        self,
        clip_coefs: list[jax.Array],
        keep: jax.Array,
        prefix: Any,
        arithmetic: Arithmetic,
    ) -> PyTree:
        """See `PerExampleGrads`."""
        sums_of = cast("PartialSums", arithmetic)  # enforced by `check_method`
        # All sites must read the same bits of the coefficients, whatever else reads
        # them.
        clip_coefs, keep = behind_a_branch(
            lambda: (clip_coefs, keep), (clip_coefs, keep)
        )
        sums: dict[int, jax.Array] = {}
        for group, coefs in zip(self._groups(prefix), clip_coefs, strict=True):
            sums |= _sums.weighted_sum(
                self.program.sites, group, self._roots, self.recorded, coefs, keep
            )
        leaves, treedef = jax.tree.flatten(self.params)
        return treedef.unflatten(sums_of.lift(sums[i]) for i in range(len(leaves)))

    @property
    def _roots(self) -> dict[int, Any]:
        return dict(enumerate(jax.tree.leaves(self.params)))

    def _groups(self, prefix: Any) -> list[list[int]]:
        """Lists the parameters of each clipping group."""
        leaves, treedef = jax.tree.flatten(self.params)
        numbers = treedef.unflatten(range(len(leaves)))
        return [jax.tree.leaves(group) for group in prefix.flatten_up_to(numbers)]
