"""Rules that say which products of a loss are rounded, and to which format."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp

from dpmp import _validate
from dpmp.programs.formats import FORMATS

# Expressions for paths of parameters, with formats; the first one that is found counts.
Rules: TypeAlias = tuple[tuple[str, str], ...]

# The products of these parameters stay in the compute dtype.
UNROUNDED = "compute"

_OF_QWIX = {jnp.dtype(jnp.int8): "int8", jnp.dtype(jnp.float8_e4m3fn): "float8"}
_NAMED_BY_QWIX = ("int8", "mxfp8", "nvfp4")


def parse(products: Any) -> Rules:
    """Makes rules of a format, a mapping from expressions to formats, or qwix's rules.

    Raises ValueError for anything else.
    """
    if products is None:
        return ()
    if isinstance(products, str):
        products = {"": products}
    if isinstance(products, Mapping):
        products = tuple(products.items())
    _validate.require(
        isinstance(products, Sequence),
        "products must be a format, or a mapping from expressions to formats. Use "
        '"int8" or {"mlp": "int8"}.',
        products=products,
    )
    rules = tuple(x if isinstance(x, tuple) else _of_qwix(x) for x in products)
    for rule in rules:
        _validate.require(
            len(rule) == 2 and isinstance(rule[0], str),
            'a rule must be an expression and a format. Use {"mlp": "int8"}.',
            rule=rule,
        )
        _validate.one_of([*FORMATS, UNROUNDED], format=rule[1])
        try:
            re.compile(rule[0])
        except re.error as error:
            _validate.fail(
                "an expression in products must be a valid regular expression",
                expression=rule[0],
                fix=f"It is not: {error}. To find a text as it is, use re.escape.",
            )
    return rules


def format_of(rules: Rules, path: str) -> str | None:
    """The format of the products of a parameter; None to leave them as they are."""
    found = (form for expression, form in rules if re.search(expression, path))
    form = next(found, UNROUNDED)
    return None if form == UNROUNDED else form


def check_found(rules: Rules, paths: Sequence[str]) -> None:
    """Raises ValueError for an expression that is found in no path."""
    unused = [
        expression
        for expression, _ in rules
        if not any(re.search(expression, path) for path in (*paths, ""))
    ]
    _validate.require(
        not unused,
        "every expression in products must be found in a parameter's path. Paths are "
        "keystr(path, simple=True, separator='/') of jax.tree_util.",
        unused=unused,
    )


def _of_qwix(rule: Any) -> tuple[str, str]:
    """Translates a rule of qwix, whose expression is for the path of a module."""
    given = {
        name: getattr(rule, name, None)
        for name in ("module_path", "weight_qtype", "act_qtype", "bwd_qtype")
    }
    _validate.require(
        isinstance(given["module_path"], str),
        "a rule must be a pair of an expression and a format, or a rule of qwix. Use "
        '{"mlp": "int8"}.',
        type=type(rule).__name__,
    )
    static = {
        name: value
        for name in ("act_static_scale", "op_names", "act_calibration_method")
        if (value := getattr(rule, name, None))
    }
    _validate.require(
        not static,
        "scales of activations must be computed from the example itself: a scale that "
        "remembers or shares other examples would let one of them change the gradients "
        "of all others. Leave these fields out",
        **static,
        fix="dpmp computes a scale for each example, and rounds products only.",
    )
    path = f"^(?:{given.pop('module_path')})(?:/|$)"
    names = {name: _name(x) for name, x in given.items()}
    forward = names["weight_qtype"]
    is_forward = names["bwd_qtype"] == UNROUNDED
    _validate.require(
        forward == names["act_qtype"] and names["bwd_qtype"] in (forward, UNROUNDED),
        "weights, activations and cotangents must have one format, or cotangents none. "
        "Give the same qtype for them.",
        **given,
    )
    if forward == UNROUNDED:
        return path, UNROUNDED
    return path, f"{forward}_forward" if is_forward else forward


def _name(qtype: Any) -> str:
    """The format for a quantised dtype of qwix."""
    if qtype is None:
        return UNROUNDED
    if isinstance(qtype, str) and qtype in _NAMED_BY_QWIX:
        return qtype
    name = _OF_QWIX.get(jnp.dtype(qtype)) if not isinstance(qtype, str) else None
    _validate.require(
        name is not None,
        "dpmp must have the format. Use int8, float8_e4m3fn, mxfp8 or nvfp4.",
        qtype=str(qtype),
    )
    return str(name)
