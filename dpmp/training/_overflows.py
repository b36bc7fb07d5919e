"""Notes that many gradients overflow, from noisy fractions that are released anyway."""

from collections.abc import Mapping
from typing import Any

# The noise alone exceeds this many standard deviations once in a billion looks.
_CLEARLY = 6.0


class OverflowNote:
    """Says once that examples train nothing, where the noisy fraction is clear.

    An example whose gradient is not finite contributes zero to a step. If all examples
    are like that, then a run learns from noise alone, and no error tells.
    """

    def __init__(self, stddev: float, *, is_dynamic: bool):
        """`stddev` is that of the noise on the fraction.

        A dynamic loss scale halves itself in its first steps, so that the note waits.
        """
        self._least = _CLEARLY * stddev
        self._is_due = True
        self.first_look = 50 if is_dynamic else 3

    def text(self, step: int, metrics: Mapping[str, Any]) -> str:
        """The note, if it is due after `step` steps of this run, or an empty text."""
        fraction = float(metrics.get("overflowed", 0.0))
        if not (self._is_due and step >= self.first_look and fraction > self._least):
            return ""
        self._is_due = False
        return (
            f"dpmp: by the released fraction, about {min(fraction, 1.0):.0%} of the "
            "examples of this step had a gradient with NaN or infinity. Such examples "
            "train nothing. If all of them are like that, the run learns from noise "
            "alone. Likely causes: NaN in the data or in the first parameters; a "
            "learning rate that is too large; with float16, a loss scale that is too "
            "large. To find out, compute the loss and its gradient on a public "
            "example, and try a smaller learning rate."
        )
