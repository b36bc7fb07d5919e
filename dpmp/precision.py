"""Which dtype the model computes in, and which its parameters are kept in.

The dtypes of norms, sums and noise are not here: they decide what the privacy claim
is worth, and belong to the mechanism.
"""

import re
from collections.abc import Callable
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

    >>> policy = Policy.from_name("mixed_bfloat16", float32_paths=("embed",))
    >>> params = policy.cast_to_compute({"embed": jnp.ones(3), "w": jnp.ones(3)})
    >>> print(params["embed"].dtype, params["w"].dtype)
    float32 bfloat16

    Attributes:
      param_dtype: of the master parameters, float32 or wider: an update that is small
        against a half-precision parameter does not change it.
      compute_dtype: of the copies that the loss is given, and of float inputs.
      matmul_precision: of products of float32 operands in the loss, as in
        `jax.default_matmul_precision`; None leaves it to jax. Norms and sums are
        computed in full precision, whatever it is.
      float32_paths: regular expressions; parameters whose path
        (`jax.tree_util.keystr(path, simple=True, separator=".")`) one of them is found
        in reach the loss in `param_dtype`.
    """

    param_dtype: Any
    compute_dtype: Any
    matmul_precision: str | None = None
    float32_paths: tuple[str, ...] = ()

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
        _validate.require(
            self.matmul_precision in (None, *_MATMUL_PRECISIONS),
            f"matmul_precision must be one of {list(_MATMUL_PRECISIONS)}, or None",
            matmul_precision=self.matmul_precision,
            fix='Use "tensorfloat32" for TF32, where the device has it.',
        )
        _validate.require(
            not isinstance(self.float32_paths, str),
            "float32_paths must be a tuple of regular expressions",
            float32_paths=self.float32_paths,
            fix='Write ("embed",) for a single one.',
        )
        object.__setattr__(self, "float32_paths", tuple(self.float32_paths))
        _validate.check_x64(self.param_dtype, "float64 parameters")

    @classmethod
    def from_name(cls, name: str, *, float32_paths: tuple[str, ...] = ()) -> "Policy":
        """A preset.

        - "float32": everything in float32.
        - "tf32": float32, with products of operands that are rounded to 10 bits on
          devices that have TF32; others compute in float32.
        - "mixed_bfloat16": the loss in bfloat16.
        - "mixed_float16": the loss in float16, whose gradients underflow below 6e-8.

        Args:
          name: of the preset.
          float32_paths: parameters that stay in float32.

        Raises:
          ValueError: for any other name.
        """
        _validate.require(
            name in _PRESETS,
            f"policy must be one of {sorted(_PRESETS)}",
            policy=name,
            fix="Use one of these names, or Policy(param_dtype=, compute_dtype=).",
        )
        return cls(jnp.float32, *_PRESETS[name], float32_paths=float32_paths)

    def cast_to_compute(self, params: PyTree) -> PyTree:
        """Casts parameters to what the loss is given, leaving what is no float.

        Raises:
          ValueError: for an expression in `float32_paths` that no path matches.
        """
        unused = set(self.float32_paths)

        def cast(path: Any, x: Any) -> jax.Array:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            found = {p for p in self.float32_paths if re.search(p, name)}
            unused.difference_update(found)
            return _cast(x, self.param_dtype if found else self.compute_dtype)

        cast_params = jax.tree_util.tree_map_with_path(cast, params)
        _validate.require(
            not unused,
            "every expression in float32_paths must be found in a path of parameters",
            unused=sorted(unused),
            fix="jax.tree_util.keystr(path, simple=True, separator='.') writes paths.",
        )
        return cast_params

    def cast_inputs(self, batch: PyTree) -> PyTree:
        """Casts float inputs to `compute_dtype`, leaving the rest."""
        return jax.tree.map(lambda x: _cast(x, self.compute_dtype), batch)

    def cast_to_param(self, tree: PyTree) -> PyTree:
        """Casts the float arrays of a tree to `param_dtype`, leaving the rest."""
        return jax.tree.map(lambda x: _cast(x, self.param_dtype), tree)

    def in_matmul_precision(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """`fun` with products in `matmul_precision`, and those of its gradient.

        Nothing outside of `fun` is affected.
        """
        if self.matmul_precision is None:
            return fun

        def scoped(*args: Any, **kwargs: Any) -> Any:
            with jax.default_matmul_precision(self.matmul_precision):
                return fun(*args, **kwargs)

        return scoped


_MATMUL_PRECISIONS = ("bfloat16", "tensorfloat32", "float32", "highest")

# Dtype and precision of products.
_PRESETS = {
    "float32": (jnp.float32, None),
    "tf32": (jnp.float32, "tensorfloat32"),
    "mixed_bfloat16": (jnp.bfloat16, None),
    "mixed_float16": (jnp.float16, None),
}


def _cast(x: Any, dtype: Any) -> jax.Array:
    is_float = jnp.issubdtype(jnp.result_type(x), jnp.floating)
    return jnp.asarray(x, dtype) if is_float else jnp.asarray(x)
