"""Policies: the dtypes of computation and of parameters."""

import contextlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp._warnings import warn
from dpmp.numerics import at_least_float32
from dpmp.precision import _rules, _stochastic_rounding
from dpmp.programs import rounded_products

_SEED = 0  # of what is rounded in a step, which is public


@dataclass(frozen=True)
class Policy:
    """The dtypes of master parameters and of computation.

    >>> policy = Policy.from_name("mixed_bfloat16", float32_paths=("embed",))
    >>> params = policy.cast_to_compute({"embed": jnp.ones(3), "w": jnp.ones(3)})
    >>> print(params["embed"].dtype, params["w"].dtype)
    float32 bfloat16

    Attributes:
      param_dtype: the dtype of the master parameters: float32 or wider, or bfloat16
        with `stochastic_rounding`. In half precision, a parameter does not change if an
        update is small compared with it.
      compute_dtype: the dtype of the copies of parameters that the loss receives, and
        of float inputs.
      matmul_precision: the precision of products of float32 operands in the loss, as in
        `jax.default_matmul_precision`. None leaves it to jax. Norms and sums always use
        full precision.
      float32_paths: regular expressions. A parameter stays in float32, or a wider
        `param_dtype`, also in the loss, if one of them is found in its path, which is
        `jax.tree_util.keystr(path, simple=True, separator="/")`. An expression that is
        found in no path is refused with a ValueError when parameters are cast.
      products: which products of the loss have operands of few bits: the name of a
        format, for all products, or a mapping from regular expressions to formats. The
        first expression that is found in the path of a parameter counts for the
        products that multiply by it. Other products have the path "", also those of
        frozen arrays that the loss closes over. Rules of qwix are taken as well. The
        formats are "float8", "mxfp8", "nvfp4" and "int8"; with "_forward" behind them,
        cotangents are not rounded; "compute" is the compute dtype. Each example has
        scales of its own. A product stays as it is if an operand is wider than
        `compute_dtype`, or if it is in a function with derivatives of its own. Dot
        products of "float8" run in 8 bits on NVIDIA GPUs from compute capability 8.9
        on; all others are emulated in `compute_dtype`. The norms and sums of book-
        keeping are never taken in few bits.
      rounded_share: the probability that the products of a parameter are rounded in a
        step. Anyone may know which ones are. Below 1, all formats are emulated.
      stochastic_rounding: whether parameters are stored in bfloat16, without float32
        masters. Updates are added in float32, and the sum is rounded up or down at
        random, so that small updates count on average. This saves 4 bytes per entry: 2
        of the master parameter, and 2 of its copy in the compute dtype.
    """

    param_dtype: Any
    compute_dtype: Any
    matmul_precision: str | None = None
    float32_paths: tuple[str, ...] = ()
    products: Any = None
    rounded_share: float = 1.0
    stochastic_rounding: bool = False

    def __post_init__(self):
        _validate.fields(
            self,
            param_dtype=_float_dtype,
            compute_dtype=_float_dtype,
            float32_paths=_patterns,
            products=_rules.parse,
            rounded_share=_validate.probability,
        )
        if self.compute_dtype.itemsize < 2:
            _validate.fail(
                "compute_dtype must have at least 16 bits. For products in float8, "
                'use Policy(jnp.float32, jnp.bfloat16, products="float8").',
                compute_dtype=self.compute_dtype.name,
            )
        if not self.products and self.rounded_share != 1:
            _validate.fail(
                "rounded_share must be 1 if no products are rounded. Pass products "
                "too.",
                rounded_share=self.rounded_share,
            )
        is_bfloat16 = self.param_dtype == jnp.bfloat16
        if not (
            is_bfloat16 if self.stochastic_rounding else self.param_dtype.itemsize >= 4
        ):
            _validate.fail(
                "param_dtype must be float32 or wider, or bfloat16 with "
                "stochastic_rounding. Narrow compute_dtype instead, or use both "
                "options.",
                param_dtype=self.param_dtype.name,
                stochastic_rounding=self.stochastic_rounding,
            )
        names = [None, "bfloat16", "tensorfloat32", "float32", "highest"]
        _validate.one_of(names, matmul_precision=self.matmul_precision)
        _validate.check_x64(self.param_dtype, "float64 parameters")

    @classmethod
    def from_name(cls, name: str, *, float32_paths: tuple[str, ...] = ()) -> "Policy":
        """Makes a policy from the name of a preset.

        - "float32": everything in float32, also on devices that would compute products
          in TF32 or bfloat16 by default.
        - "tf32": float32, with operands of products rounded to 10 bits where the device
          has TF32.
        - "mixed_bfloat16": the loss in bfloat16.
        - "mixed_float16": the loss in float16. Its gradients underflow below 6e-8.
        - "float8": the loss in bfloat16, with operands of products rounded to float8 by
          a scale for each example.

        Any other name is refused with a ValueError. `float32_paths` are those of
        `Policy`.
        """
        _validate.one_of(PRESETS, policy=name)
        return cls(jnp.float32, float32_paths=float32_paths, **PRESETS[name])

    @classmethod
    def parse(cls, policy: "Policy | str") -> "Policy":
        """Returns a policy unchanged, or the preset of a name."""
        fix = 'Use "mixed_bfloat16", for example.'
        policy = _validate.instance((Policy, str), fix, policy=policy)
        return cls.from_name(policy) if isinstance(policy, str) else policy

    def cast_to_compute(self, params: PyTree) -> PyTree:
        """Casts float parameters to the dtypes that the loss receives."""
        return self._cast_params(params, self.compute_dtype)

    def cast_to_param(self, params: PyTree) -> PyTree:
        """Casts float parameters to the dtypes that they are stored in."""
        return self._cast_params(params, self.param_dtype)

    def _cast_params(self, params: PyTree, dtype: Any) -> PyTree:
        names = _rules.checked_paths(params, "float32_paths", self.float32_paths)

        def cast(name: str, x: Any) -> jax.Array:
            is_wide = any(re.search(p, name) for p in self.float32_paths)
            return _cast(x, at_least_float32(self.param_dtype) if is_wide else dtype)

        leaves, treedef = jax.tree.flatten(params)
        return treedef.unflatten(map(cast, names, leaves))

    def cast_inputs(self, batch: PyTree) -> PyTree:
        """Casts float inputs to `compute_dtype`; other inputs are unchanged."""
        return jax.tree.map(lambda x: _cast(x, self.compute_dtype), batch)

    def cast_to_update(self, tree: PyTree) -> PyTree:
        """Casts floats for an optimizer, to float32 or a wider `param_dtype`."""
        dtype = at_least_float32(self.param_dtype)
        return jax.tree.map(lambda x: _cast(x, dtype), tree)

    def apply_updates(
        self, params: PyTree, updates: PyTree, prng_key: jax.Array | None = None
    ) -> PyTree:
        """Adds updates to stored parameters, as `optax.apply_updates` does.

        Guarantees:
          Rounding here is post-processing: its input is already released. Anyone who
          knows the input and the rounded output learns some bits of `prng_key`. Use
          that key for nothing else.

        Args:
          params: parameters in the dtypes of `cast_to_param`; the result has them too.
          updates: the updates of an optimizer that received `cast_to_update(params)`.
          prng_key: a key for this update alone. `stochastic_rounding` without a key
            raises ValueError, and so do parameters in a narrower dtype.
        """
        floats = [x for x in jax.tree.leaves(params) if _is_float(x)]
        widths = [jnp.result_type(x).itemsize for x in floats]
        if min(widths, default=8) < self.param_dtype.itemsize:
            _validate.fail(
                f"params must be the stored ones, in {self.param_dtype.name}: small "
                "updates do not change narrower ones. Pass those of cast_to_param, "
                "and give the copy of cast_to_compute to the loss alone.",
                widths=sorted(set(widths)),
            )
        if not self.stochastic_rounding:
            return optax.apply_updates(params, updates)
        if prng_key is None:
            _validate.fail("stochastic rounding needs a key. Pass a new one each step.")
        sums = optax.apply_updates(self.cast_to_update(params), updates)
        return _stochastic_rounding.round_like(sums, params, prng_key)

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats of few bits that products have."""
        forms = dict.fromkeys(form for _, form in self.products)
        return tuple(x for x in forms if x != _rules.UNROUNDED)

    @property
    def name(self) -> str:
        """The dtype of the loss, and the rules of its products if any, in words."""
        return self.compute_dtype.name + self.shown_products

    @property
    def shown_products(self) -> str:
        """The end of `name`; "" without products of few bits."""
        if not self.formats:
            return ""
        share = f", each in {self.rounded_share:.0%} of the steps"
        shown = f" with products{_rules.shown(self.products)}"
        return shown + share * (self.rounded_share < 1)

    @property
    def is_emulated(self) -> bool:
        """Whether this device takes rounded products in a wider dtype."""
        can_be_native = self.formats == ("float8",) and self.rounded_share == 1
        is_native = can_be_native and rounded_products.is_native()
        return bool(self.formats) and not is_native

    def draw_rounded(self, step: jax.Array, params: PyTree) -> jax.Array | None:
        """Draws which parameters have rounded products in a step; None for all.

        The result has a 1 or a 0 for each parameter, and one for all other products.
        """
        if not self.products or self.rounded_share == 1:
            return None
        key = jax.random.fold_in(jax.random.key(_SEED), step)
        number = len(jax.tree.leaves(params)) + 1
        drawn = jax.random.bernoulli(key, self.rounded_share, (number,))
        if isinstance(drawn, Tracer) and not isinstance(step, Tracer):
            warn(
                "coins that a compiled function draws are the same in all its calls, "
                "unless step is one of its arguments. Pass the step as an argument."
            )
        return drawn.astype(jnp.float32)

    def in_product_precision(
        self, fun: Callable[..., Any], is_rounded: jax.Array | None = None
    ) -> Callable[..., Any]:
        """Applies `matmul_precision` and `products` to `fun` and its gradient.

        The first argument of `fun` has the parameters. `is_rounded` comes from
        `draw_rounded`; None rounds all products that have a format, and warns if
        `rounded_share` says otherwise.
        """
        if self.formats and self.rounded_share < 1 and is_rounded is None:
            warn(
                f"rounded_share={self.rounded_share} has no effect without coins: all "
                "products with a format are rounded. Pass in_product_precision(fun, "
                "policy.draw_rounded(step, params)), made anew in each step."
            )
        if self.products:
            fun = _rules.applied(self.products, fun, is_rounded, self.compute_dtype)
        if self.matmul_precision is None:
            return fun

        def scoped(*args: Any, **kwargs: Any) -> Any:
            with jax.default_matmul_precision(self.matmul_precision):
                return fun(*args, **kwargs)

        return scoped


PRESETS: dict[str, dict[str, Any]] = {
    "float32": {"compute_dtype": jnp.float32, "matmul_precision": "float32"},
    "tf32": {"compute_dtype": jnp.float32, "matmul_precision": "tensorfloat32"},
    "mixed_bfloat16": {"compute_dtype": jnp.bfloat16},
    "mixed_float16": {"compute_dtype": jnp.float16},
    "float8": {"compute_dtype": jnp.bfloat16, "products": "float8"},
}


def _float_dtype(**value: Any) -> Any:
    ((name, given),) = value.items()
    dtype = None
    # NumPy takes None for float64, and raises TypeError for unknown names.
    if given is not None:
        with contextlib.suppress(TypeError):
            dtype = jnp.dtype(given)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        _validate.fail(
            f"{name} must be a float dtype. Use float32 for parameters, and float32 "
            "or bfloat16 to compute.",
            dtype=given if dtype is None else dtype.name,
        )
    return dtype


def _patterns(float32_paths: Any) -> tuple[str, ...]:
    """Checks that the argument is a sequence of regular expressions."""
    if not isinstance(float32_paths, Iterable) or isinstance(float32_paths, str):
        _validate.fail(
            'float32_paths must be a tuple of regular expressions. Write ("embed",) '
            "for a single one.",
            float32_paths=float32_paths,
        )
    paths = tuple(float32_paths)
    for path in paths:
        _rules.check_expression("every entry of float32_paths", path)
    return paths


def _cast(x: Any, dtype: Any) -> jax.Array:
    return jnp.asarray(x, dtype) if _is_float(x) else jnp.asarray(x)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)
