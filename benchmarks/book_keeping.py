"""What does book-keeping cost, next to training without privacy and to jax_privacy?

Three questions, each with a line of figures for whatever is measured in one process:

- step: clipped sums of the gradients of transformers, with layers written out and in a
  loop, of a CNN and of an LSTM. Quoted are ratios of time, as `timing.py` takes them,
  of temporary memory and of compile seconds, for `clipped_grad(method="book_keeping")`
  at once and in microbatches, to

    plain                 `jax.grad` of the mean loss
    best without privacy  the fastest of: that; that with float32 results for bfloat16
                          products, which is what XLA's CPU compiler is fast at; these
                          in microbatches of 8; and book-keeping without norms, whose
                          gradients of weights are never rounded to bfloat16
    jax_privacy           its `clipped_grad` by default; in the microbatches in which it
                          is fastest; and the fastest that takes no more memory

- growth: norms and clipped sum of the gradients of one linear layer, with inner
  products of positions ("gram") and with gradients that are formed and kept ("kept"),
  over sequence lengths and widths: whether book-keeping chooses the faster one, and how
  much longer than that a choice takes on average (geometric mean), with other costs of
  an entry in memory (`COST_OF_AN_ENTRY`) and of forming a gradient (1 in book-keeping;
  2 in bfloat16).

- extents: the share of examples that "bounded" sums scale down more than their norm
  asks for, over microbatch sizes (`dpmp.book_keeping.measure_extents`).

    python -m benchmarks.book_keeping        # forty minutes on two cores
    python -m benchmarks.book_keeping --question step --task cnn lstm --rounds 3

Every line is appended to benchmarks/results/book_keeping.jsonl.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import statistics
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import dpmp
from benchmarks import models, peers, results, timing, without_privacy
from benchmarks.subjects import DTYPES, TASKS
from dpmp import book_keeping
from dpmp._fence import behind_a_branch
from dpmp.engines.book_keeping import _choice, _engine, _norms
from dpmp.engines.book_keeping._uses import Cached
from dpmp.numerics._arithmetic import parse

Functions = dict[str, Callable[..., Any]]


LENGTHS = (64, 96, 128, 192, 256, 384, 512, 768, 1024)
WIDTHS = (128, 256, 512, 1024, 2048)
COSTS_OF_AN_ENTRY = (0, 4, 16, 64, 256, 1024)
COSTS_OF_FORMING = (0.5, 1, 2, 4)


def contenders(task: models.Task, batch_size: int) -> Functions:
    """Functions of (params, batch), by name."""
    functions: Functions = {
        "plain": jax.grad(task.loss_fn),
        **without_privacy.grad_fns(task.loss_fn),
    }
    clip = functools.partial(
        peers.jax_privacy_clipped_grad(), task.loss_fn, l2_clip_norm=1.0
    )
    for size in (None, 1, 8):
        functions[_name("jax_privacy", size)] = clip(microbatch_size=size)
    clip = functools.partial(
        dpmp.clipped_grad, task.loss_fn, l2_clip_norm=1.0, method="book_keeping"
    )
    for size in (None, *(n for n in (4, 8, 16) if n < batch_size)):
        functions[_name("dpmp", size)] = clip(
            microbatch_size=size, arithmetic="unproved_float32"
        )
    for size in (4, 8):
        bounded = clip(microbatch_size=size)
        functions[_name("dpmp bounded", size)] = bounded
    return functions


def _name(library: str, microbatch_size: int | None) -> str:
    return f"{library}, {microbatch_size or 'at once'}"


def measure_step(
    task: models.Task, batch_size: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """Figures of all contenders that accept the task."""
    args = (task.params, task.batch)
    functions, refused = contenders(task, batch_size), {}
    for name in [name for name in functions if name.startswith("dpmp bounded")]:
        try:
            jax.eval_shape(functions[name], *args)
        except ValueError as error:
            refused[name] = str(error)
            del functions[name]
    return {**compare(timing.measure(functions, args, rounds)), "refused": refused}


def compare(measured: dict[str, timing.Measured]) -> dict[str, dict[str, Any]]:
    """Ratios of book-keeping to the others, and of all to the plain gradient."""
    plain = measured["plain"]
    best = {name: _fastest(measured, name) for name in _LIBRARIES}
    best["without privacy"] = _fastest(measured, "plain", "without privacy")
    return {
        "best": best,
        "time_ratio": {
            name: _ratios(name, measured, best)
            for name in measured
            if name.startswith("dpmp")
        },
        "memory_ratio": {k: timing.memory_ratio(m, plain) for k, m in measured.items()},
        "compile_ratio": {
            k: timing.compile_ratio(m, plain) for k, m in measured.items()
        },
        "milliseconds": {k: timing.median_ms(m) for k, m in measured.items()},
        "temp_megabytes": {
            k: round(m.temp_bytes / 1e6, 1) for k, m in measured.items()
        },
    }


_LIBRARIES = ("jax_privacy", "dpmp", "dpmp bounded")


def _ratios(
    name: str, measured: dict[str, timing.Measured], best: dict[str, str | None]
) -> dict[str, float | None]:
    """Of the time of one contender to that of others."""
    limit = measured[name].temp_bytes
    references = {
        "plain": "plain",
        "best without privacy": best["without privacy"],
        "jax_privacy, at once": "jax_privacy, at once",
        "jax_privacy, best": best["jax_privacy"],
        "jax_privacy, in no more memory": _fastest(
            {k: m for k, m in measured.items() if m.temp_bytes <= limit}, "jax_privacy"
        ),
    }
    return {
        what: other and timing.time_ratio(measured[name], measured[other])
        for what, other in references.items()
    }


def _fastest(measured: dict[str, timing.Measured], *kinds: str) -> str | None:
    """The fastest of some kinds, in whatever microbatches, if there is one."""
    some = {name: m for name, m in measured.items() if name.split(",")[0] in kinds}
    return timing.fastest(some) if some else None


def step(args: argparse.Namespace) -> None:
    """Measures the tasks that were asked for."""
    for name, dtype in itertools.product(args.task, args.dtype):
        subject = TASKS[name]
        for batch_size in args.batch_size or subject.rounds:
            rounds = args.rounds or subject.rounds.get(batch_size, 3)
            task = subject.make(DTYPES[dtype], batch_size)
            results.append(
                "book_keeping",
                question="step",
                task=name,
                dtype=dtype,
                batch_size=batch_size,
                rounds=rounds,
                **measure_step(task, batch_size, rounds),
            )


def growth(args: argparse.Namespace) -> None:
    """Measures both ways through one layer, of many sizes."""
    rounds = args.rounds or 5
    for dtype in args.dtype:
        points = [
            measure_layer(length, width, DTYPES[dtype], rounds)
            for length, width in itertools.product(LENGTHS, WIDTHS)
        ]
        results.append(
            "book_keeping",
            question="growth",
            dtype=dtype,
            rounds=rounds,
            time_over_the_faster={
                f"forming {factor}, entry {cost}": time_over_the_faster(
                    points, factor, cost
                )
                for factor, cost in itertools.product(
                    COSTS_OF_FORMING, COSTS_OF_AN_ENTRY
                )
            },
            points=points,
        )
        sys.stdout.write(table(points))


def measure_layer(
    length: int, width: int, dtype: Any, rounds: int, batch_size: int = 8
) -> dict[str, Any]:
    """Times the two ways for a layer from `width` to `width`."""
    w = jnp.zeros((width, width), dtype)
    x = jax.ShapeDtypeStruct((length, width), dtype)
    program = _engine.analyse(lambda w, x: (jnp.sum((x @ w).astype(float)), ()), w, x)
    (use,), (chosen,) = program.plan.uses, program.norm_methods
    methods = {
        "gram": _norms.by_gram({0: use}, [False], 0),
        "kept": _choice.by_stored_gradient(0, use, 0),
    }
    keys = jax.random.split(jax.random.key(0))
    shape = (batch_size, length, width)
    cached = [jax.random.normal(key, shape).astype(dtype) for key in keys]
    measured = timing.measure(
        {
            name: functools.partial(_clipped_sum, program, method)
            for name, method in methods.items()
        },
        (w, *cached),
        rounds,
    )
    return {
        "length": length,
        "width": width,
        "chosen": chosen.form,
        "milliseconds": {k: timing.median_ms(m) for k, m in measured.items()},
        "gram_over_kept": timing.time_ratio(measured["gram"], measured["kept"]),
    }


def _clipped_sum(
    program: _engine.Program, method: _norms.NormMethod, w: Any, *arrays: jax.Array
) -> Any:
    """Sums the gradients of a layer from its cached arrays, by some norm method."""
    uses = _choice.dense_if_stored([method], program.plan.uses)
    program = dataclasses.replace(program, norm_methods=[method], uses=uses)
    cached = [Cached(*arrays)]
    stored = behind_a_branch(
        lambda: _choice.store_gradients([method], program.plan.uses, cached), arrays
    )
    x, _ = arrays
    grads = _engine.BookKeptGrads(jnp.zeros(len(x)), (), program, w, stored)
    one_group = jax.tree.structure(0)
    (norm,) = grads.squared_norms(one_group)
    assert norm.bound is not None
    keep, coefs = jnp.full(len(x), True), jax.lax.rsqrt(norm.bound)
    return grads.weighted_sum([coefs], keep, one_group, parse(None))


def time_over_the_faster(
    points: list[dict[str, Any]], cost_of_forming: float, cost_of_an_entry: int
) -> float:
    """The geometric mean of the time of what would be chosen, over the shorter one."""
    logs = []
    for point in points:
        length, width = point["length"], point["width"]
        gram = length**2 * (2 * width + cost_of_an_entry) + width**2 * length
        kept = width**2 * (cost_of_forming * length + 2 * cost_of_an_entry)
        log_ratio = math.log(point["gram_over_kept"])
        logs.append(max(log_ratio if gram < kept else -log_ratio, 0))
    return round(math.exp(statistics.mean(logs)), 3)


def table(points: list[dict[str, Any]]) -> str:
    """Time of "gram" over that of "kept", marked where the slower one is chosen."""
    cells = {}
    for point in points:
        ratio = point["gram_over_kept"]
        is_wrong = (point["chosen"] == "gram") == (ratio > 1)
        cell = f"{ratio:.2f} {point['chosen']}{'!' if is_wrong else ' '}"
        cells[point["length"], point["width"]] = cell
    header = "length \\ width".ljust(16) + "".join(f"{w:>16}" for w in WIDTHS)
    rows = [
        f"{length:<16}" + "".join(f"{cells[length, width]:>16}" for width in WIDTHS)
        for length in LENGTHS
    ]
    return "\n".join([header, *rows, ""])


def extents(args: argparse.Namespace) -> None:
    """Measures what "bounded" sums cut of random data, at random parameters."""
    for name, dtype in itertools.product(args.task, args.dtype):
        task = TASKS[name].make(DTYPES[dtype], 64)
        shares = {}
        for size in (4, 8, 16, 32):
            found = book_keeping.measure_extents(
                task.loss_fn, task.params, task.batch, microbatch_size=size
            )
            shares[size] = {
                "largest": round(found.largest, 2),
                "share_cut": found.share_cut,
                "median": round(float(jnp.median(found.ratios)), 2),
            }
        results.append(
            "book_keeping", question="extents", task=name, dtype=dtype, by_size=shares
        )


QUESTIONS = {"step": step, "growth": growth, "extents": extents}


def main() -> None:
    """Runs what was asked for and appends its figures."""
    parser = argparse.ArgumentParser(description="Measures what book-keeping costs.")
    parser.add_argument(
        "--question", choices=QUESTIONS, nargs="*", default=[*QUESTIONS]
    )
    parser.add_argument("--task", choices=TASKS, nargs="*", default=[*TASKS])
    parser.add_argument("--dtype", choices=DTYPES, nargs="*", default=[*DTYPES])
    parser.add_argument("--batch-size", type=int, nargs="*", help="multiples of 8")
    parser.add_argument("--rounds", type=int)
    args = parser.parse_args()
    for question in args.question:
        QUESTIONS[question](args)


if __name__ == "__main__":
    main()
