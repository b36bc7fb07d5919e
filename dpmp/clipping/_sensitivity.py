"""A function that comes with a bound on its sensitivity."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import dp_accounting
import jax

from dpmp import _validate
from dpmp._validate import as_real
from dpmp.accounting import DEFAULT_RELATION


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
    """

    fun: Callable[..., Any]
    l2_norm_bound: float
    has_aux: bool
    assumes_fixed_slots: bool = False

    def __post_init__(self):
        object.__setattr__(self, "l2_norm_bound", as_real(self.l2_norm_bound))

    def __call__(
        self, *args: Any, is_padding_example: jax.Array | None = None, **kwargs: Any
    ) -> Any:
        """Calls `fun`; for its arguments, see the function that made this callable."""
        return self.fun(*args, is_padding_example=is_padding_example, **kwargs)

    def sensitivity(
        self,
        neighboring_relation: dp_accounting.NeighboringRelation = DEFAULT_RELATION,
    ) -> float:
        """The L2 sensitivity of the computed output.

        Guarantees:
          The bound holds for the computed numbers, because the clip norm was lowered to
          cover their rounding. It also holds for two batches of different sizes. It
          may be exceeded by sums whose arithmetic has a name that begins with
          "unproved". It is twice as large for replace-one as for add/remove and
          zero-out (REPLACE_SPECIAL).

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
    _validate.require(
        isinstance(neighboring_relation, relations),
        "neighboring_relation must be a dp_accounting.NeighboringRelation",
        neighboring_relation=neighboring_relation,
        fix="Use ADD_OR_REMOVE_ONE, REPLACE_ONE or REPLACE_SPECIAL.",
    )
    _validate.require(
        not (
            assumes_fixed_slots and neighboring_relation is relations.ADD_OR_REMOVE_ONE
        ),
        '"bounded" sums must have neighbours of equal size',
        neighboring_relation=neighboring_relation.name,
        fix='Use REPLACE_SPECIAL (zero-out), whose epsilon is the same, or "exact" '
        'sums with method="per_example".',
    )
    return l2_norm_bound * (2 if neighboring_relation is relations.REPLACE_ONE else 1)
