"""How does the time grow with parameters, batch, sequence and number of arrays?

One size of a transformer is changed at a time. Timed in turn are the gradient of the
mean loss ("plain"), clipped sums by both engines, and noise for the parameters alone.
The number of arrays is that of a network of square layers whose parameters are 2^20 in
all. For each axis, the exponent says how time follows the size: 1 is proportional, and
0 is not at all. It is the slope of the logarithms, by least squares.

    python -m benchmarks.growth           # seven minutes on two cores
"""

import math
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, models
from dpmp import noise_addition

_BATCH_SIZE, _ENTRIES = 16, 2**20


def _with(batch_size: int = _BATCH_SIZE, **changes: int) -> models.Task:
    options: Any = {"depth": 2, **changes}
    return models.transformer(jnp.bfloat16, batch_size, **options)


def _with_arrays(num_arrays: int) -> models.Task:
    """Square layers of the same number of parameters in all."""
    sizes = {"width": math.isqrt(_ENTRIES // num_arrays), "depth": num_arrays}
    return models.square_layers(jnp.bfloat16, _BATCH_SIZE, **sizes)


AXES: dict[str, tuple[Callable[[int], models.Task], tuple[int, ...]]] = {
    "width": (lambda n: _with(width=n), (64, 128, 256, 512)),
    "batch": (_with, (8, 16, 32, 64, 128)),
    "length": (lambda n: _with(length=n), (32, 64, 128, 256, 512)),
    "arrays": (_with_arrays, (4, 16, 64, 256)),
}


def contenders(task: models.Task) -> tuple[dict[str, Callable[..., Any]], Any]:
    """Functions of (params, batch, noise_state), and these."""
    kept, exact = (
        task.clipped_grad(microbatch_size=8, method=method)
        for method in ("book_keeping", "per_example")
    )
    key = jax.random.key(0)
    privatizer = noise_addition.gaussian_privatizer(stddev=1.0, prng_key=key)
    shapes = jax.eval_shape(exact, *task.args)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    functions = {
        "plain": lambda params, batch, _: jax.grad(task.loss_fn)(params, batch),
        "book_keeping, bounded": lambda params, batch, _: kept(params, batch),
        "per_example, exact": lambda params, batch, _: exact(params, batch),
        "noise alone": lambda params, batch, state: privatizer.update(zeros, state),
    }
    return functions, (*task.args, privatizer.init(task.params))


def exponents(points: list[dict[str, Any]]) -> dict[str, float]:
    """The slope of the logarithm of the time over that of the size."""
    sizes = np.log([point["size"] for point in points])

    def slope(name: str) -> float:
        times = np.log([point["milliseconds"][name] for point in points])
        return round(float(np.polyfit(sizes, times, 1)[0]), 2)

    return {name: slope(name) for name in points[0]["milliseconds"]}


def benchmark(
    axis: Annotated[str, harness.Each(AXES)], rounds: int = 7, sizes: int = 0
) -> harness.Lines:
    """A line for each axis, of the smallest of its sizes or of all."""
    make, all_sizes = AXES[axis]
    points = []
    for size in all_sizes[: sizes or None]:
        task = make(size)
        parameters = sum(x.size for x in jax.tree.leaves(task.params))
        figures = harness.measure(*contenders(task), rounds).figures("plain")
        points.append({"size": size, "parameters": parameters, **figures})
    yield {"points": points, "exponents": exponents(points)}


if __name__ == "__main__":
    harness.main(benchmark, tiny={"axis": ["width"], "rounds": 1, "sizes": 2})
