"""Which dtype the model computes in, and which its parameters are kept in.

The dtypes of norms, sums and noise are not here: they decide what the privacy claim
is worth, and belong to the mechanism.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dpmp import _validate
from dpmp._typing import PyTree


@dataclass(frozen=True)
class Policy:
    """Dtypes of master parameters and of computation.

    >>> policy = Policy.from_name("mixed_bfloat16")
    >>> params = policy.cast_to_param({"w": jnp.ones(3), "steps": jnp.arange(2)})
    >>> compute_params = policy.cast_to_compute(params)
    >>> print(params["w"].dtype, compute_params["w"].dtype)
    float32 bfloat16

    Attributes:
      param_dtype: of the master parameters, float32 or wider: an update that is small
        against a half-precision parameter does not change it.
      compute_dtype: of the copies that the loss is given, and of float inputs.
    """

    param_dtype: Any
    compute_dtype: Any

    def __post_init__(self):
        for name in ("param_dtype", "compute_dtype"):
            dtype = jnp.dtype(getattr(self, name))
            _validate.require(
                jnp.issubdtype(dtype, jnp.floating),
                f"{name} must be a float dtype",
                dtype=dtype.name,
                fix="Use float32 for parameters, and float32 or bfloat16 to compute.",
            )
            object.__setattr__(self, name, dtype)
        _validate.require(
            self.param_dtype.itemsize >= 4,
            "param_dtype must be float32 or wider",
            param_dtype=self.param_dtype.name,
            fix="Narrow compute_dtype instead.",
        )
        _validate.check_x64(self.param_dtype, "float64 parameters")

    @classmethod
    def from_name(cls, name: str) -> "Policy":
        """The preset of a name: "float32" or "mixed_bfloat16".

        Raises:
          ValueError: for any other name.
        """
        _validate.require(
            name in _PRESETS,
            f"policy must be one of {sorted(_PRESETS)}",
            policy=name,
            fix="Use one of these names, or Policy(param_dtype=, compute_dtype=).",
        )
        return cls(*_PRESETS[name])

    def cast_to_compute(self, tree: PyTree) -> PyTree:
        """Casts the float arrays of a tree to `compute_dtype`, leaving the rest."""
        return _cast_floats(tree, self.compute_dtype)

    def cast_to_param(self, tree: PyTree) -> PyTree:
        """Casts the float arrays of a tree to `param_dtype`, leaving the rest."""
        return _cast_floats(tree, self.param_dtype)


_PRESETS = {
    "float32": (jnp.float32, jnp.float32),
    "mixed_bfloat16": (jnp.float32, jnp.bfloat16),
}


def _cast_floats(tree: PyTree, dtype: Any) -> PyTree:
    def cast(x):
        is_float = jnp.issubdtype(jnp.result_type(x), jnp.floating)
        return jnp.asarray(x, dtype) if is_float else jnp.asarray(x)

    return jax.tree.map(cast, tree)
