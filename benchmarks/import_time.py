"""How long does it take to import a library, beyond importing jax?

Each import is made in a process of its own, which imports jax first. The libraries take
turns. Quoted are medians of seconds.

    python -m benchmarks.import_time        # two minutes on two cores
"""

import functools
import subprocess
import sys

from benchmarks import harness

# What people import to train privately.
LIBRARIES = {
    "dpmp": ("dpmp",),
    "jax_privacy": ("jax_privacy.clipping", "jax_privacy.noise_addition"),
    "dp_accounting": ("dp_accounting",),
    "Opacus": ("opacus",),
}
_PROGRAM = """
import importlib, sys, time
import jax, jax.numpy
start = time.perf_counter()
for name in sys.argv[1:]:
    importlib.import_module(name)
print(time.perf_counter() - start)
"""


def seconds_to_import(modules: tuple[str, ...]) -> float:
    """Seconds in a new process that has imported jax."""
    command = [sys.executable, "-W", "ignore", "-c", _PROGRAM, *modules]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def benchmark(rounds: int = 7) -> harness.Lines:
    """A line for all libraries that are installed."""
    found = {
        name: functools.partial(seconds_to_import, modules)
        for name, modules in LIBRARIES.items()
        if harness.is_installed(modules[0].partition(".")[0])
    }
    # The first round reads files from the disk.
    taken = [{name: call() for name, call in found.items()} for _ in range(rounds + 1)]
    measured = harness.Measured({k: [x[k] for x in taken[1:]] for k in found})
    yield {
        "seconds": harness.rounded(measured.medians(), 2),
        "range": {
            name: [round(min(x), 2), round(max(x), 2)]
            for name, x in measured.seconds.items()
        },
        "absent": sorted({*LIBRARIES} - {*found}),
    }


if __name__ == "__main__":
    harness.main(benchmark, tiny={"rounds": 1})
