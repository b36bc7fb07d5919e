"""How close to its claim is the epsilon that an audit finds, and is it ever above?

Canaries attack mechanisms with Poisson sampling, random allocation, and correlated
noise of both kinds (`dpmp.audit.canaries`, as `python -m dpmp audit` does with more of
them). A line has the lower bounds on epsilon of many audits, over the claim, and how
many of them are above it: at confidence 95 %, at most 5 % may be.

    python -m benchmarks.canaries                 # half an hour on two cores
    python -m benchmarks.canaries --seeds 100     # two hours
"""

from typing import Annotated

import numpy as np

import dpmp
from benchmarks import harness
from dpmp.tools.audit._command import WAYS, mechanism_of


def benchmark(
    way: Annotated[str, harness.Each(WAYS)],
    epsilon: Annotated[float, harness.Each(default=(1.0, 2.0, 4.0, 8.0))],
    seeds: int = 25,
    canaries: int = 2**16,
) -> harness.Lines:
    """A line for each way to draw batches and noise, and each claim."""
    mechanism = mechanism_of(way, epsilon)
    audits = [
        dpmp.audit.canaries(
            mechanism, num_canaries=canaries, confidence=0.95, seed=seed
        )
        for seed in range(seeds)
    ]
    shares = np.array([x.epsilon / x.claimed for x in audits])
    yield {
        "seeds": seeds,
        "canaries": canaries,
        "shares": harness.rounded(
            {"least": shares.min(), "mean": shares.mean(), "most": shares.max()}, 4
        ),
        "above": int(np.sum(shares > 1)),
    }


if __name__ == "__main__":
    tiny = {"way": ["Poisson sampling"], "epsilon": [8.0], "seeds": 2}
    harness.main(benchmark, tiny=tiny | {"canaries": 2**12})
