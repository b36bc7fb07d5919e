"""Labelled records: read from a file, divided, and turned into tokens.

Error messages name files and lines, and never what they hold.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import llm
import numpy as np
from records import spam_assassin_emails, split

Labelled = tuple[str, str]  # a label and a text


def read(path: pathlib.Path | None, labels: Sequence[str]) -> list[Labelled]:
    """The records with their labels; without a path, public e-mails."""
    if path is None:
        found = spam_assassin_emails()
        return [(label, text) for label in labels for text in found.get(label, ())]
    try:
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(
            f"--data and --held-out must be .jsonl files in UTF-8; got {path} "
            f"({type(error).__name__})."
        ) from None
    return [_parse(x, labels, f"{path}:{i}") for i, x in enumerate(lines, 1) if x]


def _parse(line: str, labels: Sequence[str], place: str) -> Labelled:
    try:
        value = json.loads(line)
        label, text = value["label"], value["text"]
    except (ValueError, TypeError, KeyError):
        raise SystemExit(
            f'{place}: must be a JSON object with the fields "label" and "text".'
        ) from None
    if label not in labels or not isinstance(text, str):
        raise SystemExit(
            f"{place}: the label must be one of --labels ({', '.join(labels)}), and "
            "the text a string."
        )
    return label, text


def private_and_held_out(
    data: pathlib.Path | None, held_out: pathlib.Path | None, labels: Sequence[str]
) -> tuple[list[Labelled], list[Labelled]]:
    """Records to train on, and records to evaluate on.

    Without a file of the latter, they are chosen from `data` by a hash of their texts.
    """
    records = read(data, labels)
    parts: tuple[list[Labelled], list[Labelled]] = ([], [])
    if held_out is not None:
        parts = records, read(held_out, labels)
    else:
        held_out_texts = set(split([text for _, text in records])[1])
        for record in records:
            parts[record[1] in held_out_texts].append(record)
    if not all(parts):
        raise SystemExit(
            "There must be private and held-out records; got "
            f"{len(parts[0])} and {len(parts[1])}. Pass more records, or public ones "
            "with --held-out."
        )
    return parts


class Form(NamedTuple):
    """How labels and texts become tokens."""

    tokenizer: llm.Tokenizer
    end_tokens: tuple[int, ...]
    prompt: str  # with {label} in it
    length: int  # tokens of a text; longer texts are cut off

    @classmethod
    def of(cls, model: llm.Pretrained, prompt: str, length: int) -> "Form":
        """The form for a model."""
        if "{label}" not in prompt:
            raise SystemExit(f"--prompt must have {{label}} in it; got {prompt!r}.")
        return cls(model.tokenizer, model.config.end_tokens[:1], prompt, length)

    def prompt_of(self, label: str) -> str:
        """What the model continues with a text of the label."""
        return self.prompt.replace("{label}", label)

    def cut(self, records: Sequence[Labelled]) -> list[Labelled]:
        """The parts of texts that the model is trained on."""
        decode = self.tokenizer.decode
        return [(label, decode(self._tokens(text))) for label, text in records]

    def batch(self, records: Sequence[Labelled]) -> llm.losses.Batch:
        """Examples for `llm.mean_nats`, whose targets are the tokens of the texts."""
        prompts = [self.tokenizer.encode(self.prompt_of(x)) for x, _ in records]
        shape = len(records), max(map(len, prompts)) + self.length
        tokens, is_target = np.zeros(shape, np.int32), np.zeros(shape, bool)
        for i, (prompt, (_, text)) in enumerate(zip(prompts, records, strict=True)):
            ids = [*prompt, *self._tokens(text)]
            tokens[i, : len(ids)] = ids
            is_target[i, len(prompt) : len(ids)] = True
        return {"tokens": tokens, "is_target": is_target}

    def _tokens(self, text: str) -> list[int]:
        # Without marks, which are in front of the prompt.
        ids = self.tokenizer.inner.encode(text, add_special_tokens=False).ids
        return [*ids, *self.end_tokens][: self.length]

    def check_holds(self, text: str) -> None:
        """Stops unless a text, a canary, is never cut off."""
        needed = len(self._replace(length=10**6)._tokens(text))
        if needed > self.length:
            raise SystemExit(
                f"--length must be at least {needed} for canaries; got {self.length}. "
                "Increase it, or plant none with --copies 0."
            )
