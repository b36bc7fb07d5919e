"""What benchmarks need of another library, or a message that says how to get it."""

from collections.abc import Callable
from typing import Any


def jax_privacy_clipped_grad() -> Callable[..., Any]:
    """`jax_privacy.clipping.clipped_grad`; stops the program if it is not installed."""
    try:
        import jax_privacy.clipping
    except ImportError as error:
        raise SystemExit(
            f"jax_privacy, which this benchmark compares dpmp to, must be installed; "
            f"got: {error}. Run: pip install '.[bench]'"
        ) from None
    return jax_privacy.clipping.clipped_grad
