"""What does each precision cost in accuracy, with privacy and without?

Two tasks (`accuracy_tasks.py`) are trained in every precision from several seeds, with
DP-SGD at epsilon 8 and delta 1e-5, and once more without clipping and noise. A seed
decides on batches and noise, alike in all rows but the naive one (which has others),
and on the digits' initial parameters; what seeds do to float32 is what a difference
between precisions has to be held against.

    float32, tf32    the reference; TF32 where the device has it
    bf16 naive       all of DP-SGD in bfloat16 (`naive.py`), which dpmp refuses
    mixed_bfloat16   the policy of that name
    autocast         the float32 policy, and the loss under `dpmp.autocast`
    fp16 ...         the policy "mixed_float16": without a loss scale, with a constant
                     one, and with `dpmp.loss_scaling.DynamicScale`

The loss is a sum over predictions, divided by 2^22. So do training loops of large
models that average over all tokens of a batch, of which there are millions; and so
small are gradients of a loss that is added to others with a small weight. Clip norms
have the same factor, and the optimizer takes it out again in float32, so that in exact
arithmetic nothing would change. In float16, which has nothing below 6e-8, it does.

A line has the score on held-out data, computed in float32 in all rows, and:

    lost_updates           the share of updates, not zero, that did not change the
                           parameter they were added to
    lost_gradients         the share of entries of per-example gradients that are zero,
                           and are not in float32
    largest_contribution   the norm, in float64, of the largest contribution of an
                           example to the sum, over the clip norm: above 1 there is less
                           noise than the claimed epsilon takes

The last two are of 64 training examples, at the parameters that came out. All data
here are public, as such figures ask for.

What to know of the settings: learning rates are those of Adam's customary 1e-3 or
twice that, where bfloat16 parameters lose half of the updates or more; on digits, the
naive row is no worse than float32 with 100 private steps at 5e-3. The dynamic scale
starts at its default and doubles every 10 steps (by default, 100), to be seen to move;
at the end of the digits' 300 steps it is so large that one or two examples of a batch
overflow, which it tolerates and which then contribute nothing.

    python -m benchmarks.accuracy_by_precision           # half an hour on two cores
    python -m benchmarks.accuracy_by_precision --smoke   # two minutes; appends nothing
    python -m benchmarks.accuracy_by_precision --tasks digits --rows float32 tf32
    python -m benchmarks.accuracy_by_precision --table

Every run is appended to benchmarks/results/accuracy_by_precision.jsonl when it ends;
--resume leaves out those that are there.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax

import dpmp
from benchmarks import accuracy_rows, accuracy_tasks, results
from benchmarks.accuracy_rows import ROWS, Check, Run

EPSILON, DELTA = 8.0, 1e-5
NUM_CHECKED = 64
RESULTS = pathlib.Path(__file__).parent / "results" / "accuracy_by_precision.jsonl"
TASKS = {"digits": accuracy_tasks.digits, "transformer": accuracy_tasks.transformer}

Line = dict[str, Any]


def make_mechanism(task: accuracy_tasks.Task, params: Any) -> dpmp.DPSGD:
    """DP-SGD for a task, of the loss with its weight."""
    return dpmp.DPSGD(
        num_examples=task.num_examples,
        expected_batch_size=task.batch_size,
        iterations=task.steps,
        l2_clip_norm=task.l2_clip_norm * task.loss_weight,
        microbatch_size=task.microbatch_size,
        num_parameters=sum(x.size for x in jax.tree.leaves(params)),
    ).calibrate(epsilon=EPSILON, delta=DELTA)


def run_task(args: argparse.Namespace, name: str, record: Callable[..., None]) -> None:
    """Everything that was asked for of one task."""
    task = TASKS[name]()
    task = task._replace(steps=args.steps or task.steps)
    mechanism = make_mechanism(task, task.initial_params(0))
    lines = read_lines(RESULTS) if args.resume else []
    done = {_key(line) for line in lines if line["device"] == results.device()}
    for row in args.rows:
        if row == "tf32" and jax.default_backend() == "cpu":
            continue
        run = Run(task, ROWS[row], mechanism)
        checks = accuracy_rows.make_checks(run)
        for is_private in (True, False):
            what = {
                "task": name,
                "metric": task.metric,
                "row": row,
                "is_private": is_private,
                "steps": task.steps,
            }
            seeds = [x for x in args.seeds if _key({**what, "seed": x}) not in done]
            for line in measure(run, is_private, seeds, checks):
                record(**what, **line)


def measure(
    run: Run, is_private: bool, seeds: list[int], checks: dict[str, Check]
) -> Iterable[Line]:
    """Trains from every seed, and gives the figures of each."""
    mechanism = run.mechanism if is_private else run.mechanism.without_privacy()
    train = accuracy_rows.make_trainer(run._replace(mechanism=mechanism))
    examples = jax.tree.map(lambda x: x[:NUM_CHECKED], run.task.train)
    for seed in seeds:
        start = time.perf_counter()
        initial = run.task.initial_params(seed)
        trained = train(initial, seed)
        score = run.task.evaluate(trained.params)
        seconds = time.perf_counter() - start
        yield {
            "seed": seed,
            "epsilon": mechanism.guarantee().epsilon if is_private else None,
            "loss_weight": run.task.loss_weight,
            "noise_multiplier": mechanism.noise_multiplier,
            "score": score,
            "score_before": run.task.evaluate(initial),
            "loss_scale": trained.loss_scale,
            "lost_updates": trained.lost_updates,
            **{
                name: check(trained.params, examples, trained.loss_scale)
                for name, check in checks.items()
                if is_private or name != "largest_contribution"
            },
            "seconds": round(seconds, 1),
        }


def _key(line: Line) -> tuple[Any, ...]:
    """What a run is recognised by."""
    names = ("task", "row", "is_private", "steps", "seed")
    return tuple(line[name] for name in names)


def read_lines(path: pathlib.Path) -> list[Line]:
    """What was recorded, the last line of each run; empty without a file."""
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines()]
    return list({(line["device"], _key(line)): line for line in lines}.values())


def tables(lines: list[Line]) -> str:
    """A table for each device, task and number of steps, in markdown."""
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        where = (line.get("device"), line["task"], line["metric"], line["steps"])
        groups.setdefault(where, []).append(line)
    return "\n".join(_table(group) for group in groups.values())


_HEADER = (
    "precision",
    "private",
    "not private",
    "minus float32 of the same seed",
    "updates lost",
    "gradient entries lost",
    "largest contribution / clip norm",
)


def _table(lines: list[Line]) -> str:
    before = statistics.mean(line["score_before"] for line in lines)
    title = "{task}, {metric}, {steps} steps".format(**lines[0])
    title += f"; {before:.3f} before; {lines[0].get('device', 'this device')}"
    rows = [_HEADER, ("---",) * len(_HEADER)]
    rows += [_cells(lines, row) for row in ROWS]
    body = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"{title}\n\n{body}\n"


def _cells(lines: list[Line], row: str) -> tuple[str, ...]:
    """A row: the figures of all seeds, private / not private."""

    def values(name, is_private, row=row):
        chosen = (x for x in lines if (x["row"], x["is_private"]) == (row, is_private))
        return {line["seed"]: line[name] for line in chosen if name in line}

    def largest(name, is_private, form):
        found = values(name, is_private).values()
        return form.format(max(found)) if found else "-"

    def both(name):
        return " / ".join(largest(name, x, "{:.2%}") for x in (True, False))

    scores = [
        (values("score", x), values("score", x, "float32")) for x in (True, False)
    ]
    if not any(ours for ours, _ in scores):
        missing = "not here" if row == "tf32" else "not run"
        return (row, missing, missing, *["-"] * (len(_HEADER) - 3))
    return (
        row,
        *(_score(*pair) for pair in scores),
        " / ".join(_difference(*pair) for pair in scores),
        both("lost_updates"),
        both("lost_gradients"),
        largest("largest_contribution", True, "{:.5f}"),
    )


def _score(ours: dict[int, float], reference: dict[int, float]) -> str:
    """The mean and the range; marked where the mean is outside of the reference's."""
    scores, others = ours.values(), reference.values()
    if not scores:
        return "not run"
    mean = statistics.mean(scores)
    is_outside = others and not min(others) <= mean <= max(others)
    mark = "!" if is_outside else ""
    return f"{mean:.4f}{mark} ({min(scores):.4f} to {max(scores):.4f})"


def _difference(ours: dict[int, float], reference: dict[int, float]) -> str:
    """Of runs with the same seed, the range."""
    differences = [ours[seed] - reference[seed] for seed in ours if seed in reference]
    if not differences:
        return "-"
    return f"{min(differences):+.4f} to {max(differences):+.4f}"


def parse_args() -> argparse.Namespace:
    """The flags; each has a default."""
    parser = argparse.ArgumentParser(
        description="Measures what each precision costs in accuracy."
    )
    add = parser.add_argument
    add("--tasks", nargs="+", choices=TASKS)
    add("--rows", nargs="+", choices=ROWS, default=[*ROWS])
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--steps", type=int, help="of training, in place of the task's own")
    add("--resume", action="store_true", help="leave out runs that were recorded")
    add("--smoke", action="store_true", help="a few steps from one seed; no record")
    table = {"nargs": "?", "type": pathlib.Path, "const": RESULTS, "metavar": "FILE"}
    add("--table", **table, help="only print what was recorded, there or in a file")
    return parser.parse_args()


def main() -> None:
    """Trains what was asked for, and prints the tables."""
    args = parse_args()
    if args.table:
        sys.stdout.write(tables(read_lines(args.table)))
        return
    lines: list[Line] = []

    def record(**line: Any) -> None:
        if not args.smoke:
            results.append(RESULTS.stem, **line)
        lines.append(line)
        sys.stdout.write(f"{len(lines)}. {line['row']}: {line['score']:.4f}\n")

    if args.smoke:
        args.steps, args.seeds = 3, [0]
        args.tasks = args.tasks or ["digits"]
    for task in args.tasks or TASKS:
        run_task(args, task, record)
    sys.stdout.write(tables(lines if args.smoke else read_lines(RESULTS)))


if __name__ == "__main__":
    main()
