"""Which two datasets are neighbours, unless a caller says otherwise."""

import dp_accounting

from dpmp import _validate

# The default of every function and class of dpmp: one example of the first dataset is
# blanked out in the second. Both have the same size, which is public.
DEFAULT_RELATION = dp_accounting.NeighboringRelation.REPLACE_SPECIAL


def check_relation(neighboring_relation: dp_accounting.NeighboringRelation) -> None:
    """Raises TypeError for anything but a relation of dp_accounting's."""
    _validate.require(
        isinstance(neighboring_relation, dp_accounting.NeighboringRelation),
        "neighboring_relation must be a dp_accounting.NeighboringRelation",
        neighboring_relation=neighboring_relation,
        fix="Use dp_accounting.NeighboringRelation.REPLACE_SPECIAL, for example.",
        error=TypeError,
    )
