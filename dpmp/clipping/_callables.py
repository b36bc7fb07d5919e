"""The functions that users call, with a bound on their sensitivity."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import dp_accounting
import jax
import jax.core
import jax.numpy as jnp
from jax.typing import ArrayLike

from dpmp import _meshes, _validate
from dpmp._arrays import as_mask, without_debugging
from dpmp._typing import PyTree
from dpmp._validate import as_real
from dpmp.accounting import DEFAULT_RELATION
from dpmp.clipping._clipped_sum import ClippedSum, Outputs


@dataclass(frozen=True)
class BoundedSensitivityCallable:
    """A function of a batch with a bound on the sensitivity of its output.

    The sensitivity is the largest L2 norm by which the outputs for two neighbouring
    batches may differ. If `has_aux` is False, the bound holds for the whole output.
    Otherwise the output is a pair, and the bound holds for its first part. The second
    part holds per-example values, which are sensitive and must not be released.

    Attributes:
      fun: the function.
      l2_norm_bound: the largest L2 norm of the contribution of an example to the sum.
      has_aux: whether the output is a pair.
      assumes_fixed_slots: whether the bound holds only if all other examples keep their
        places in the batch.
      size_of_microbatches: the function behind `microbatch_size`.
    """

    fun: Callable[..., Any]
    l2_norm_bound: float
    has_aux: bool
    assumes_fixed_slots: bool = False
    size_of_microbatches: Callable[..., int] | None = None

    def __post_init__(self):
        object.__setattr__(self, "l2_norm_bound", as_real(self.l2_norm_bound))

    def __call__(
        self, *args: Any, is_padding_example: ArrayLike | None = None, **kwargs: Any
    ) -> Any:
        """Calls `fun`; for its arguments, see the function that made this callable."""
        return self.fun(*args, is_padding_example=is_padding_example, **kwargs)

    def microbatch_size(self, *args: Any, **kwargs: Any) -> int:
        """How many examples a call processes at a time, on each device.

        It depends on shapes alone, so a `jax.ShapeDtypeStruct` may stand for any array.
        """
        assert self.size_of_microbatches is not None
        return self.size_of_microbatches(*args, **kwargs)

    def sensitivity(
        self, neighboring_relation: dp_accounting.NeighboringRelation = DEFAULT_RELATION
    ) -> float:
        """The L2 sensitivity of the computed output.

        Guarantees:
          The bound holds for the computed numbers, and for two batches of different
          sizes. Sums whose arithmetic has a name that begins with "unproved" may exceed
          it. It is twice as large for replace-one as for add/remove and zero-out
          (REPLACE_SPECIAL).

        Args:
          neighboring_relation: which two batches are neighbours.

        Returns:
          The sensitivity, in the unit of the output.

        Raises:
          ValueError: if `neighboring_relation` is not a relation of dp_accounting, or
            if it is ADD_OR_REMOVE_ONE and `assumes_fixed_slots` is True.
        """
        return sensitivity(
            self.l2_norm_bound,
            neighboring_relation,
            assumes_fixed_slots=self.assumes_fixed_slots,
        )


def sensitivity(
    l2_norm_bound: float,
    neighboring_relation: dp_accounting.NeighboringRelation,
    *,
    assumes_fixed_slots: bool,
) -> float:
    """See `BoundedSensitivityCallable.sensitivity`."""
    relations = dp_accounting.NeighboringRelation
    _validate.instance(
        relations,
        "Use ADD_OR_REMOVE_ONE, REPLACE_ONE or REPLACE_SPECIAL.",
        neighboring_relation=neighboring_relation,
    )
    if assumes_fixed_slots and neighboring_relation is relations.ADD_OR_REMOVE_ONE:
        _validate.fail(
            '"bounded" sums must have neighbours of equal size. Use REPLACE_SPECIAL '
            '(zero-out), whose epsilon is the same, or "exact" sums with '
            'method="per_example".',
            neighboring_relation=neighboring_relation.name,
        )
    return l2_norm_bound * (2 if neighboring_relation is relations.REPLACE_ONE else 1)


def make_callable(
    clipped_sum: ClippedSum,
    select: Callable[[PyTree, Outputs], Any],
    *,
    has_aux: bool,
    has_params: bool,
    l2_norm_bound: float,
    is_rebuilt_each_step: bool = False,
) -> BoundedSensitivityCallable:
    """Makes the function that users call, for arrays on meshes of any kind.

    `select` computes its output from the sum and the per-example outputs. With
    `has_params`, the sum has the structure and shardings of the parameters. A function
    that a loop makes anew in each step is not compiled here.
    """
    signature = clipped_sum.signature

    def fun(divided_sum, *args, is_padding_example, **kwargs):
        signature.check(args)
        divided = divided_sum.shards.kwarg_specs or ()
        others = {name: x for name, x in kwargs.items() if name not in divided}
        signature.warn_of_shared(args, others)
        if has_params:
            divided_sum.clip_norms.check_prefix_of(signature.params(args))
        return select(*divided_sum(args, kwargs, is_padding_example))

    def out_specs(specs, output):
        total, outputs = output if has_aux else (output, ())
        params = jax.tree.leaves(signature.params(specs)) if has_params else []
        batch = specs[signature.batch_argnums[0]]
        return [*_specs_of_sum(total, params), *specs_of_examples(outputs, batch)]

    def on_any_mesh(*args, **kwargs):
        given = functools.partial(fun, clipped_sum.divided_like(args))
        return _meshes.on_automatic_axes(given, out_specs)(*args, **kwargs)

    def size_of_microbatches(*args, **kwargs):
        args, sizes = signature.with_arrays(args), []

        def trace(args):
            divided_sum = clipped_sum.divided_like(args)
            sizes.append(divided_sum.size_of_microbatches(args, kwargs))

        jax.eval_shape(trace, args)
        return sizes[0]

    arrays = (*signature.of_params, *signature.of_examples)
    compiled = on_any_mesh if is_rebuilt_each_step else _compiled(on_any_mesh, arrays)

    def with_arrays(*args, is_padding_example, **kwargs):
        is_padding = as_mask(is_padding_example=is_padding_example)
        args = signature.with_arrays(args)
        with without_debugging():
            return compiled(*args, is_padding_example=is_padding, **kwargs)

    return BoundedSensitivityCallable(
        with_arrays,
        l2_norm_bound,
        has_aux,
        assumes_fixed_slots=clipped_sum.arithmetic.needs_norm_bounds,
        size_of_microbatches=size_of_microbatches,
    )


def _specs_of_sum(total: PyTree, params: Sequence[jax.P]) -> list[jax.P]:
    """Partition specs for a sum: those of the parameters, and replicated otherwise."""
    number = len(jax.tree.leaves(total))
    return [*params[:number], *[jax.P()] * (number - len(params))]


def specs_of_examples(outputs: PyTree, batch: PyTree) -> list[jax.P]:
    """Partition specs for per-example outputs, from those of the batch."""
    axis = jax.tree.leaves(batch)[0][:1]
    return [jax.P(*axis)] * len(jax.tree.leaves(outputs))


def _compiled(fun: Callable[..., Any], argnums: Sequence[int]) -> Callable[..., Any]:
    """Compiles each call outside of traced functions as one program, not as dozens.

    All values but arrays and the arguments in `argnums` are constants of the program.
    """

    @functools.partial(jax.jit, static_argnums=(2, 3))
    def program(named, arrays, treedef, constants):
        is_padding, *named = named
        arrays, named = iter(arrays), iter(named)
        args, kwargs = treedef.unflatten(
            next(arrays) if kind is None else x for kind, x in constants
        )
        args = [next(named) if i in argnums else x for i, x in enumerate(args)]
        return fun(*args, is_padding_example=is_padding, **kwargs)

    def call(*args, is_padding_example, **kwargs):
        named = [is_padding_example, *(x for i, x in enumerate(args) if i in argnums)]
        others = [None if i in argnums else x for i, x in enumerate(args)], kwargs
        leaves, treedef = jax.tree.flatten(others)
        arrays = [x for x in leaves if isinstance(x, jax.Array)]
        constants = tuple(
            (None, None) if isinstance(x, jax.Array) else (type(x), x) for x in leaves
        )
        if _fits_program((named, arrays), constants):
            return program(named, arrays, treedef, constants)
        return fun(*args, is_padding_example=is_padding_example, **kwargs)

    return call


def _fits_program(arguments: PyTree, constants: Any) -> bool:
    """Whether jit can take the arguments; for others, `fun` raises a better error."""
    leaves = jax.tree.leaves(arguments)
    # The loss may close over values that an outer transformation traces.
    if any(isinstance(x, jax.core.Tracer) for x in (jnp.zeros(()), *leaves)):
        return False
    try:
        hash(constants)
        jax.tree.map(jax.typeof, leaves)
    except TypeError:
        return False
    return True
