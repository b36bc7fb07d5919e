"""The book-keeping engine: per-example norms and clipped sums without the gradients.

One pass forward records what goes into every site, one pass back the cotangents of what
comes out (Bu et al., 2022); neither forms a per-example gradient, except where nothing
else is known to be exact.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dpmp import _jaxpr
from dpmp._accumulation import Accumulator
from dpmp._fence import behind_a_branch
from dpmp._typing import GradEngine, PyTree, SquaredNorm
from dpmp.book_keeping import _norms, _products, _sums, _views
from dpmp.book_keeping._norms import Recorded, Term
from dpmp.book_keeping._plan import Plan, execute, make_plan
from dpmp.book_keeping._views import View


@dataclass(frozen=True)
class Program:
    """What is known of a loss before it is evaluated.

    Attributes:
      plan: of the loss of one example, a function of parameters and the example.
      params: the roots that are parameters.
      terms: of their squared norms.
      aux_treedef: of what the loss returns besides its value.
    """

    plan: Plan
    params: list[View]
    terms: list[Term]
    aux_treedef: Any

    def dummies(self) -> list[jax.Array]:
        """Zeros, in the place of which cotangents come out."""
        shapes = (site.cotangent for site in self.plan.sites)
        return [jnp.zeros(x.shape, x.dtype) for x in shapes]


def analyse(
    fun: Callable[[PyTree, PyTree], tuple[Any, PyTree]], params: PyTree, example: PyTree
) -> Program:
    """Finds the sites of a loss, and how to compute norms from them.

    Args:
      fun: `fun(params, example)` gives the loss and auxiliary outputs.
      params: arrays or their shapes.
      example: the same, of one example.
    """
    closed, treedef = _jaxpr.trace(fun, params, example)
    avals = closed.in_avals
    num_params = len(jax.tree.leaves(params))
    roots = [
        _views.make_root(i, aval, is_param=True)
        for i, aval in enumerate(avals[:num_params])
    ]
    plan = make_plan(closed, [*roots, *[None] * (len(avals) - num_params)])
    program = Program(plan, roots, [], treedef.children()[1])
    _, records = jax.eval_shape(
        lambda *args: execute(plan, args, program.dummies()), *avals
    )
    terms = _norms.make_terms(plan.sites, roots, records)
    return dataclasses.replace(program, terms=terms)


def engine(
    fun: Callable[..., tuple[Any, PyTree]],
    *,
    argnums: int | Sequence[int],
    batch_argnums: Sequence[int],
    prng_argnum: int | None,
    spmd_axis_name: Any,
) -> GradEngine:
    """An engine that differentiates `fun` for the examples of a batch.

    Args:
      fun: from one example's arguments to (loss, aux).
      argnums: the positions of the parameters.
      batch_argnums: the positions of arguments with a leading example axis.
      prng_argnum: the position of an argument that holds one key per example.
      spmd_axis_name: as in `jax.vmap`.

    Returns:
      A function of the arguments of `fun`, batched, that gives `BookKeptGrads`.
    """
    of_examples = [*batch_argnums, *([] if prng_argnum is None else [prng_argnum])]
    single = isinstance(argnums, int)
    of_params = [argnums] if single else list(argnums)

    def of_one_example(args, kwargs, params, example):
        args = list(args)
        for i, x in (*zip(of_params, params, strict=True), *example.items()):
            args[i] = x
        return fun(*args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> BookKeptGrads:
        params = [args[i] for i in of_params]
        examples = {i: args[i] for i in of_examples}
        loss = functools.partial(of_one_example, args, kwargs)
        program = analyse(loss, params, jax.tree.map(_first, examples))
        leaves = jax.tree.leaves(params)
        compute = _products.with_float32_results(
            jax.vmap(
                functools.partial(_one_example, program),
                in_axes=(None, 0),
                spmd_axis_name=spmd_axis_name,
            )
        )
        values, aux, recorded = behind_a_branch(
            lambda: compute(leaves, jax.tree.leaves(examples)), (args, kwargs)
        )
        tree = params[0] if single else tuple(params)
        return BookKeptGrads(values, aux, program, tree, recorded)

    return run


def _first(x: Any) -> Any:
    return jax.typeof(x).update(shape=jnp.shape(x)[1:])


def _one_example(
    program: Program, params: list[Any], example: list[Any]
) -> tuple[Any, PyTree, Recorded]:
    """Loss, auxiliary outputs, and what is recorded on the way forth and back."""

    def tapped(dummies: list[jax.Array]) -> Any:
        outputs, records = execute(program.plan, [*params, *example], dummies)
        return outputs[0], (outputs[1:], records)

    value, vjp, (aux, records) = jax.vjp(tapped, program.dummies(), has_aux=True)
    (cotangents,) = vjp(jnp.ones_like(value))
    aux = jax.tree.unflatten(program.aux_treedef, aux)
    return value, aux, (records, cotangents)


@dataclass(frozen=True)
class BookKeptGrads:
    """`PerExampleGrads` that are never formed.

    Attributes:
      values: per-example losses, (B,).
      aux: per-example auxiliary outputs, leaves (B, ...).
      program: what was run.
      params: the parameters.
      recorded: values and cotangents of all sites, with a leading example axis.
    """

    values: jax.Array
    aux: PyTree
    program: Program
    params: PyTree
    recorded: Recorded

    def squared_norms(self, prefix: Any) -> list[SquaredNorm]:
        """See `PerExampleGrads`; roundings are not counted."""
        program = self.program
        of_params = _norms.squared_norms(program.terms, self._roots, self.recorded)
        zero = jnp.zeros(self.values.shape, jnp.float32)
        return [
            SquaredNorm(
                sum((of_params[i] for i in group if i in of_params), zero),
                0,
                sum(math.prod(program.params[i].aval.shape) for i in group),
            )
            for group in self._groups(prefix)
        ]

    def weighted_sum(
        self,
        clip_coefs: list[jax.Array],
        keep: jax.Array,
        prefix: Any,
        accumulator: Accumulator,
    ) -> PyTree:
        """See `PerExampleGrads`."""
        sums: dict[int, jax.Array] = {}
        for group, coefs in zip(self._groups(prefix), clip_coefs, strict=True):
            sums |= _sums.weighted_sum(
                self.program.plan.sites, group, self._roots, self.recorded, coefs, keep
            )
        leaves, treedef = jax.tree.flatten(self.params)
        return treedef.unflatten(accumulator.lift(sums[i]) for i in range(len(leaves)))

    @property
    def _roots(self) -> dict[int, Any]:
        return dict(enumerate(jax.tree.leaves(self.params)))

    def _groups(self, prefix: Any) -> list[list[int]]:
        """The parameters of each clipping group."""
        leaves, treedef = jax.tree.flatten(self.params)
        numbers = treedef.unflatten(range(len(leaves)))
        return [jax.tree.leaves(group) for group in prefix.flatten_up_to(numbers)]
