"""What does a product cost, by dtype?

Products of square matrices, one with long sums, those of a layer with weights of
(256, 1024) and of the gradient of these (of 8192 positions, in one axis and in two),
and those of attention, for operands of each dtype and for 16-bit ones with a result of
16 bits and of float32. Quoted are ratios of time to full float32, taken within rounds.
"float32 by default" is what jax does with float32 operands when it is asked for no
precision.

    python -m benchmarks.dtype_matmul        # four or five minutes on two cores
"""

import math
from typing import Annotated, NamedTuple

import jax

from benchmarks import harness
from dpmp.tools import devices


class Product(NamedTuple):
    """Shapes of two operands, and how they are contracted, as in `jnp.einsum`."""

    contraction: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def num_operations(self) -> int:
        """Multiplications and additions."""
        names, _ = self.contraction.split("->")
        pairs = zip(names.split(","), self.shapes, strict=True)
        sizes = {
            i: n for axes, shape in pairs for i, n in zip(axes, shape, strict=True)
        }
        return 2 * math.prod(sizes.values())


_QUERIES, _WEIGHTS = (16, 256, 8, 64), (16, 8, 256, 256)
PRODUCTS = {
    f"square, {n}": Product("ij,jk->ik", ((n, n), (n, n)))
    for n in (256, 512, 1024, 2048)
} | {
    "long sums": Product("ij,jk->ik", ((1024, 65536), (65536, 1024))),
    "layer": Product("ti,io->to", ((8192, 256), (256, 1024))),
    "gradient of weights": Product("ti,to->io", ((8192, 256), (8192, 1024))),
    "gradient of weights, of sequences": Product(
        "bti,bto->io", ((32, 256, 256), (32, 256, 1024))
    ),
    "attention scores": Product("bqhd,bkhd->bhqk", (_QUERIES, _QUERIES)),
    "attention values": Product("bhqk,bkhd->bqhd", (_WEIGHTS, _QUERIES)),
}
_FLOAT64 = devices.Kind("float64", "float64", "float64")


def benchmark(
    product: Annotated[str, harness.Each(PRODUCTS)], rounds: int = 15
) -> harness.Lines:
    """A line for each product: kinds that run are timed, the others' errors named."""
    chosen = PRODUCTS[product]
    operands = chosen.shapes, chosen.contraction
    programs, errors = devices.compile_all(devices.KINDS, *operands)
    with jax.enable_x64(True):
        more = devices.compile_all([_FLOAT64], *operands)
    measured = harness.in_turn(programs | more[0], rounds)
    yield {
        **chosen._asdict(),
        "time_ratio": measured.time_over("float32"),
        "milliseconds": measured.milliseconds(),
        "gigaoperations_per_second": {
            name: round(chosen.num_operations / x / 1e9, 1)
            for name, x in measured.medians().items()
        },
        "refused": errors | more[1],
    }


if __name__ == "__main__":
    harness.main(benchmark, tiny={"product": ["square, 256"], "rounds": 1})
