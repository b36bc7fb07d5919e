"""The default definition of neighbouring datasets."""

import dp_accounting

from dpmp import _validate

# The default everywhere in dpmp: one example of the first dataset is blanked out in the
# second. Both datasets have the same size, which is public.
DEFAULT_RELATION = dp_accounting.NeighboringRelation.REPLACE_SPECIAL


def check_relation(neighboring_relation: dp_accounting.NeighboringRelation) -> None:
    """Raises TypeError unless the argument is a relation of dp_accounting."""
    _validate.require(
        isinstance(neighboring_relation, dp_accounting.NeighboringRelation),
        "neighboring_relation must be a dp_accounting.NeighboringRelation",
        neighboring_relation=neighboring_relation,
        fix="Use dp_accounting.NeighboringRelation.REPLACE_SPECIAL, for example.",
        error=TypeError,
    )
