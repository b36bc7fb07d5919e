"""Do "bounded" sums and the norms of book-keeping keep their promises on this device?

Checked on shapes that are large enough for the kernels that real models get, beside
integers and float64 on the host:

- sums move by at most the clip norm when an example goes, with factors that are made to
  add up rounding errors, and with embeddings whose rows are used over and over;
- they are the same bits when they run again;
- norms are those of float64, up to rounding in float32.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpmp
from benchmarks.gpu import programs
from benchmarks.gpu.programs import Session, finding
from benchmarks.models import GPT2, TINY
from dpmp.numerics import BoundedSums

_RESOLUTION = 2**22


def run(session: Session) -> None:
    """Runs all checks."""
    programs.run_checks(session, (bounded_sums, repetitions, norms))


def _linear_loss(w: jax.Array, batch: Any) -> jax.Array:
    """Its gradient is the sum over positions of x (x) g, both as they are given."""
    products = (batch["x"] @ w).astype(jnp.float32) * batch["g"].astype(jnp.float32)
    return jnp.sum(products)


def _bounded_sum(
    loss: Callable[..., Any], microbatch_size: int, options: Any = programs.REPEATABLE
) -> Callable[..., Any]:
    fn = dpmp.clipped_grad(
        loss,
        l2_clip_norm=1.0,
        method="book_keeping",
        arithmetic=BoundedSums(_RESOLUTION),
        microbatch_size=microbatch_size,
    )

    def steps(params: Any, batch: Any, empty: jax.Array) -> Any:
        total = fn(params, batch, is_padding_example=empty)
        leaves = jax.tree.leaves(total, is_leaf=lambda x: isinstance(x, dpmp.GridArray))
        return jnp.concatenate([leaf.counts.ravel() for leaf in leaves])

    return programs.jitted(steps, options)


def _factors(is_tiny: bool, dtype: Any) -> dict[str, dict[str, jax.Array]]:
    """Batches whose gradients, of (n, m), are hard to sum."""
    size, positions, n, m = (32, 16, 8, 16) if is_tiny else (32, 128, 512, 1024)
    rng = np.random.default_rng(0)
    x, g = rng.normal(size=(size, positions, n)), rng.normal(size=(size, positions, m))
    signs = np.resize([1.0, -1.0], positions)[:, None]
    eps = float(jnp.finfo(dtype).eps)
    nearly = 1 + rng.uniform(-1, 1, size=g.shape) * eps * 2
    scales = np.exp2(rng.integers(-6, 6, size=(size, positions, 1)))
    upward = 1 + eps * rng.integers(0, 3, size=g.shape)
    same_x, same_g = x[:, :1] + 0 * x, g[:, :1] + 0 * g
    cases = {
        "random": (x, g),
        "equal positions": (same_x, same_g),
        "cancelling": (same_x, signs * same_g),
        "nearly cancelling": (same_x, signs * same_g * nearly),
        "many sizes": (x * scales, g / scales**0.5),
        "rounded upward": (np.abs(same_x), upward),
        "one entry": (x * (np.arange(n) == 3), g * (np.arange(m) == 5)),
        "a spike": (x, g * np.where(np.arange(positions) == 7, 60.0, 1.0)[:, None]),
    }
    return {
        name: {
            "x": jnp.asarray(a.astype(np.float32)).astype(dtype),
            "g": jnp.asarray(b.astype(np.float32)).astype(dtype),
        }
        for name, (a, b) in cases.items()
    }


def _zero_weights(batch: Any) -> jax.Array:
    return jnp.zeros((batch["x"].shape[2], batch["g"].shape[2]), batch["x"].dtype)


def bounded_sums(session: Session) -> Iterator[dict[str, Any]]:
    """What one example moves, in integers."""
    # A microbatch of 32 has several groups.
    sizes = ((jnp.bfloat16, 32), (jnp.bfloat16, 4), (jnp.float32, 4), (jnp.float16, 2))
    for dtype, microbatch_size in sizes:
        cases = _factors(session.is_tiny, dtype)
        w = _zero_weights(cases["random"])
        total = functools.partial(_bounded_sum(_linear_loss, microbatch_size), w)
        where = f"{np.dtype(dtype).name}, microbatches of {microbatch_size}"
        for name, batch in cases.items():
            change = _largest_change(functools.partial(total, batch), len(batch["x"]))
            what = f"change by one example, over the clip norm; {name}, {where}"
            yield finding(what, change, 1)


def _largest_change(total: Callable[[np.ndarray], Any], size: int) -> float:
    """Over examples that go, from all of them and from few."""

    def steps(empty: Any) -> np.ndarray:
        return np.asarray(total(np.isin(np.arange(size), empty))).astype(np.int64)

    whole = steps([])
    changes = [whole - steps([i]) for i in {*range(0, size, 5), size - 1}]
    changes += [steps(np.arange(2, size)) - steps(np.arange(1, size))]
    return max(float(np.sqrt(np.sum(c * c))) for c in changes) / _RESOLUTION


def repetitions(session: Session) -> Iterator[dict[str, Any]]:
    """A model with embeddings of which examples use the same rows over and over."""
    params, batch, loss = _small_transformer(session.is_tiny)
    size = len(batch["tokens"])
    for name, options in (("", programs.REPEATABLE), (", not asked for", {})):
        total = functools.partial(_bounded_sum(loss, 2, options), params, batch)
        runs = [np.asarray(total(np.zeros(size, bool))) for _ in range(5)]
        differing = max(int(np.sum(x != runs[0])) for x in runs)
        what = f"entries that differ from run to run{name}"
        yield finding(what, differing, 0, is_promised=not name)
        change = _largest_change(total, size)
        what = f"change by one example, over the clip norm{name}"
        yield finding(what, change, 1, is_promised=not name)


def _small_transformer(is_tiny: bool) -> tuple[Any, Any, Callable[..., Any]]:
    """Bfloat16 parameters, tokens that repeat, and a loss."""
    sizes: Any = {"width": 256, "num_layers": 2, "num_heads": 4}
    length, sizes = (8, TINY) if is_tiny else (100, {"vocabulary_size": 512, **sizes})
    task = GPT2(4, length, **sizes)
    params = optax.tree.cast(task.params, jnp.bfloat16)
    tokens = jax.random.randint(jax.random.key(1), (4, length), 0, 3)
    return params, {**task.batch, "tokens": tokens}, task.loss_fn


def norms(session: Session) -> Iterator[dict[str, Any]]:
    """Beside norms in float64 on the host."""
    cases = _factors(session.is_tiny, jnp.float32)
    fn = dpmp.clipped_grad(
        _linear_loss,
        l2_clip_norm=1e9,
        method="book_keeping",
        arithmetic="bounded",
        microbatch_size=2,
        return_grad_norms=True,
    )
    run_norms = jax.jit(lambda w, batch: fn(w, batch)[1].grad_norms)
    for name, batch in cases.items():
        found = np.asarray(run_norms(_zero_weights(batch), batch)).astype(np.float64)
        x, g = (np.asarray(batch[k]).astype(np.float64) for k in "xg")
        exact = np.array([np.linalg.norm(a.T @ b) for a, b in zip(x, g, strict=True)])
        extent = np.sum(np.linalg.norm(x, axis=2) * np.linalg.norm(g, axis=2), axis=1)
        # On the longest path: an inner product of either factor, and a sum over T^2.
        roundings = x.shape[2] + g.shape[2] + 2 * x.shape[1] + 64
        error = np.max(np.abs(found**2 - exact**2) / extent**2)
        what = f"error of a squared norm, over the squared extent; {name}"
        yield finding(what, error, roundings * 2.0**-23)
        if name in ("one entry", "random", "equal positions"):
            # With a product in TF32 it would be 2^-12 or more.
            error = np.max(np.abs(found / exact - 1))
            yield finding(f"relative error of a norm; {name}", error, 2.0**-16)
