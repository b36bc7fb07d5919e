"""Rules that say which products of a loss are rounded, and to which format."""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp._warnings import warn
from dpmp.programs import rounded_products
from dpmp.programs.formats import FORMATS

# Expressions for paths of parameters, with formats; the first one that is found counts.
Rules: TypeAlias = tuple[tuple[str, str], ...]

# The products of these parameters stay in the compute dtype.
UNROUNDED = "compute"

_OF_QWIX = {jnp.dtype(jnp.int8): "int8", jnp.dtype(jnp.float8_e4m3fn): "float8"}

# Other fields of qwix's rules, with the values that change nothing.
_ACCEPTED: dict[str, tuple[Any, ...]] = {
    "op_names": ((),),
    "tile_size": (),
    "weight_calibration_method": ("absmax",),
    "act_calibration_method": ("absmax",),
    "bwd_calibration_method": ("absmax",),
    "bwd_weight_grad_tile_size": (),
    "disable_channelwise_axes": (False,),
    "additional_qt_config": ({},),
}


def parse(products: Any) -> Rules:
    """Makes rules of a format, a mapping from expressions to formats, or qwix's."""
    if products is None:
        return ()
    if isinstance(products, str):
        products = {"": products}
    if hasattr(products, "module_path"):  # a rule of qwix
        products = (products,)
    if isinstance(products, Mapping):
        products = tuple(products.items())
    if not isinstance(products, Sequence):
        _validate.fail(
            "products must be a format, or a mapping from expressions to formats. Use "
            '"int8" or {"mlp": "int8"}.',
            products=products,
        )
    rules = tuple(x if isinstance(x, tuple) else _of_qwix(x) for x in products)
    for rule in rules:
        if len(rule) != 2 or not isinstance(rule[0], str):
            _validate.fail(
                'a rule must be an expression and a format. Use {"mlp": "int8"}.',
                rule=rule,
            )
        _validate.one_of([*FORMATS, UNROUNDED], format=rule[1])
        check_expression("an expression in products", rule[0])
    return rules


def check_expression(what: str, expression: Any) -> None:
    """Raises ValueError unless `expression`, which is `what`, is a regular one."""
    try:
        re.compile(expression)
    except (re.error, TypeError) as error:
        _validate.fail(
            f"{what} must be a valid regular expression",
            expression=expression,
            fix=f"It is not: {error}. To find a text as it is, use re.escape.",
        )


def shown(rules: Rules) -> str:
    """The rules as they may follow the word "products"."""
    is_for_all = len(rules) == 1 and rules[0][0] == ""
    return f" in {rules[0][1]}" if is_for_all else f"={dict(rules)}"


def applied(
    rules: Rules,
    fun: Callable[..., Any],
    is_rounded: jax.Array | None,
    compute_dtype: Any,
) -> Callable[..., Any]:
    """Makes `fun` round its products by rules; see `Policy.in_product_precision`."""

    def rounded_fun(params: PyTree, *args: Any, **kwargs: Any) -> Any:
        expressions = [expression for expression, _ in rules]
        paths = checked_paths(params, "products", expressions, others=[""])
        if is_rounded is not None and np.shape(is_rounded) != (len(paths) + 1,):
            _validate.fail(
                "is_rounded must have a number for each parameter, and one for all "
                "other products. Use policy.draw_rounded(step, params).",
                is_rounded=is_rounded,
                parameters=len(paths),
            )
        found = [rule_for(rules, path) for path in (*paths, "")]
        without_products = {rule for rule in found[:-1] if rule is not None}

        def choose(number: int | None) -> rounded_products.Choice | None:
            place = len(paths) if number is None else number
            rule = found[place]
            if rule is None:
                return None
            without_products.discard(rule)
            drawn = None if is_rounded is None else is_rounded[place]
            return rounded_products.Choice(rule[1], drawn)

        rounded = rounded_products.with_rounded_products(
            fun, choose, widest=compute_dtype
        )
        results = rounded(params, *args, **kwargs)
        if without_products:
            warn(
                "no product of the loss is rounded by "
                f"products={dict(sorted(without_products))}. Either an operand is "
                f"wider than {compute_dtype.name} in all of them, as behind a layer in "
                "float32 whose result is not cast back; or they are in a function with "
                "derivatives of its own; or no product has this parameter itself."
            )
        return results

    return rounded_fun


def name_of(path: Any) -> str:
    """The path of a parameter as the expressions of a policy see it."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def rule_for(rules: Rules, path: str) -> tuple[str, str] | None:
    """The rule for the products of a parameter; None to leave them as they are."""
    found = next((rule for rule in rules if re.search(rule[0], path)), None)
    return None if found is None or found[1] == UNROUNDED else found


def checked_paths(
    params: PyTree, what: str, expressions: Sequence[str], others: Sequence[str] = ()
) -> list[str]:
    """The paths of parameters; ValueError for an expression that is found in none."""
    paths = [name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    unused = {
        expression
        for expression in expressions
        if not any(re.search(expression, path) for path in (*paths, *others))
    }
    if unused:
        _validate.fail(
            f"every expression in {what} must be found in a parameter's path. The "
            f"first ones are {', '.join(paths[:8])}.",
            unused=sorted(unused),
        )
    return paths


def _of_qwix(rule: Any) -> tuple[str, str]:
    """Translates a rule of qwix, whose expression is for the whole path of a module."""
    module_path = getattr(rule, "module_path", None)
    if not isinstance(module_path, str):
        _validate.fail(
            "a rule must be a pair of an expression and a format, or a rule of qwix. "
            'Use {"mlp": "int8"}.',
            type=type(rule).__name__,
        )
    if getattr(rule, "act_static_scale", None):
        _validate.fail(
            "scales of activations must be computed from the example itself: a scale "
            "that remembers or shares other examples would let one of them change the "
            "gradients of all others. Leave act_static_scale out.",
            act_static_scale=True,
        )
    others = {
        name: value
        for name, accepted in _ACCEPTED.items()
        if (value := getattr(rule, name, None)) not in (None, *accepted)
    }
    if others:
        _validate.fail(
            "rules of qwix must leave scales, blocks and operations to the format. "
            "Leave these fields out.",
            **others,
        )
    qtypes: dict[str, Any] = {
        name: getattr(rule, f"{name}_qtype", None) for name in ("weight", "act", "bwd")
    }
    weight, act, bwd = map(_name, qtypes.values())
    if weight != act or bwd not in (weight, UNROUNDED):
        _validate.fail(
            "weights, activations and cotangents must have one format, or cotangents "
            "none. Give the same qtype for them.",
            **qtypes,
        )
    # Linen's variables are in a collection, and NNX's arrays in variables.
    path = f"^(?:params/)?(?:{module_path})(?:/[^/]+){{1,2}}$"
    is_forward = bwd == UNROUNDED != weight
    return path, f"{weight}_forward" if is_forward else weight


def _name(qtype: Any) -> str:
    """The format for a quantised dtype of qwix."""
    if qtype is None:
        return UNROUNDED
    if isinstance(qtype, str) and qtype in ("mxfp8", "nvfp4"):
        return qtype
    name = None
    with contextlib.suppress(TypeError):
        name = _OF_QWIX.get(jnp.dtype(qtype))
    if name is None:
        _validate.fail(
            "dpmp must have the format. Use int8, float8_e4m3fn, mxfp8 or nvfp4.",
            qtype=str(qtype),
        )
    return str(name)
