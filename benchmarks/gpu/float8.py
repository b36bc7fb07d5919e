"""What float8 saves, next to bfloat16: products, and a transformer's training step."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import dpmp
from benchmarks import gpt2
from benchmarks.gpu import programs
from benchmarks.gpu.programs import Program
from benchmarks.gpu.session import Session
from dpmp.programs import _float8
from dpmp.tools.devices import _products

_SHAPE = gpt2.Shape(4, 2048, 16, vocabulary=8192, positions=512)
_KINDS = ("bfloat16", "bfloat16 -> float32", "float8_e4m3fn -> float32")
_POLICIES = {"bfloat16": "mixed_bfloat16", "float8": "float8"}


def run(session: Session) -> None:
    """Products, then steps."""
    shape, tokens_shape = _SHAPE, (32, 256)
    if session.is_tiny:
        shape, tokens_shape = gpt2.TINY, (4, 8)
    if session.compile_only:
        _float8.is_native = lambda: True  # as it is on an H100
    steps = _steps(shape, tokens_shape)
    if session.compile_only:
        programs.compile_all(session, steps)
        return
    for size in (32,) if session.is_tiny else (4096, 8192, 16384):
        _compare_products(session, size)
    _compare_steps(session, shape, tokens_shape, steps)


def _steps(shape: gpt2.Shape, tokens_shape: tuple[int, int]) -> dict[str, Program]:
    """From float32 masters to gradients, by engine and dtype of the products."""
    key = jax.random.key(0)
    args = (
        jax.eval_shape(lambda: gpt2.init(shape, key)),
        jax.ShapeDtypeStruct(tokens_shape, jnp.int32),
    )
    return {
        f"{engine}, {dtype}": Program(
            functools.partial(_step, dpmp.Policy.from_name(preset), make, shape), args
        )
        for engine, make in _ENGINES.items()
        for dtype, preset in _POLICIES.items()
    }


_MICROBATCH_SIZE = 4
_ENGINES: dict[str, Callable[..., Any]] = {
    "plain": jax.grad,
    "book-keeping, float32": functools.partial(
        dpmp.clipped_grad,
        l2_clip_norm=1.0,
        method="book_keeping",
        arithmetic="unproved_float32",
    ),
    "per example, exact": functools.partial(
        dpmp.clipped_grad,
        l2_clip_norm=1.0,
        method="per_example",
        arithmetic="exact",
        microbatch_size=_MICROBATCH_SIZE,
    ),
}


def _step(
    policy: dpmp.Policy,
    make: Callable[..., Any],
    shape: gpt2.Shape,
    params: Any,
    tokens: jax.Array,
) -> Any:
    grad_fn = make(policy.in_product_precision(gpt2.loss_fn(shape)))
    return grad_fn(policy.cast_to_compute(params), tokens)


def _compare_steps(
    session: Session,
    shape: gpt2.Shape,
    tokens_shape: tuple[int, int],
    steps: dict[str, Program],
) -> None:
    """A line for each step when it ran, and one for all so far after each engine."""
    key = jax.random.key(0)
    tokens = jax.random.randint(key, tokens_shape, 0, shape.vocabulary)
    args = gpt2.init(shape, key), tokens
    calls: dict[str, Callable[[], Any]] = {}
    for name, trial in programs.try_all(session, steps, args):
        calls[name] = trial.call
        if len(calls) % len(_POLICIES) == 0:  # an engine more
            rounds = 2 if session.is_tiny else 10
            seconds = programs.in_turn(session, calls, rounds=rounds)
            session.record(
                "comparison",
                shape=shape._asdict(),
                tokens=tokens_shape,
                **programs.summarize(seconds, reference="plain, bfloat16"),
            )


def _compare_products(session: Session, size: int) -> None:
    kinds = [kind for kind in _products.KINDS if kind.name in _KINDS]
    shapes = (size, size), (size, size)
    calls, errors = _products.compile_all(kinds, shapes)
    seconds = programs.in_turn(session, calls, rounds=2 if session.is_tiny else 10)
    figures = programs.summarize(seconds, reference="bfloat16")
    session.record("product", size=size, **figures, errors=errors)
