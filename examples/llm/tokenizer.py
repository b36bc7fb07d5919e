"""Tokenizers of the package `tokenizers`, from a `tokenizer.json` or a GGUF file."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from ._packages import need

# How byte-level tokenizers cut text into words before they merge bytes. Keys are the
# names in GGUF files; the values say whether every digit is a word of its own.
_SPLITS_DIGITS = {"gpt-2": False, "smollm": True}

# Texts that tokenizers with other rules, but the same vocabulary, cut differently.
_PROBES = ("In 2024, 3.14 of them can't\n\n  wait…", "ÅNGSTRÖM naïve 数学 🙂\t\r\n x")

# Settings that transformers writes, with paths of the machine that wrote them.
_LOCAL_PATHS = ("name_or_path", "special_tokens_map_file")

_CONTROL, _USER_DEFINED = 3, 4  # types of tokens in GGUF files


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Turns text into numbers of tokens, and back.

    Attributes:
      inner: the `tokenizers.Tokenizer`.
      settings: the contents of `tokenizer_config.json`, which transformers reads.
    """

    inner: Any
    settings: Mapping[str, Any]

    @property
    def vocabulary_size(self) -> int:
        """One more than the largest number of a token."""
        return max(self.inner.get_vocab().values()) + 1

    @property
    def digest(self) -> str:
        """A number in hexadecimal that differs between different tokenizers.

        A program that serves a model can compare it with the one of training. It is
        computed from the vocabulary, and from how the text of every token is cut.
        """
        vocabulary = sorted(self.inner.get_vocab().items())
        texts = [self.decode([number]) for _, number in vocabulary]
        cut = self.inner.encode_batch([*texts, *_PROBES])
        behaviour = [vocabulary, [text.ids for text in cut]]
        return hashlib.sha256(json.dumps(behaviour).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with marks around it if `tokenizer.json` says so.

        A rendered chat that begins with the first mark gets no other one.
        """
        marked = self.inner.encode(text).ids
        plain = self.inner.encode(text, add_special_tokens=False).ids
        begins_twice = marked[:1] == plain[:1] and marked[1 : len(plain) + 1] == plain
        return marked[1:] if begins_twice and plain else marked

    def encode_with_ends(
        self, text: str, *, add_marks: bool
    ) -> tuple[list[int], list[int]]:
        """The tokens of a text, and the number of characters up to each token's end.

        The second list has zeros for marks that `add_marks` adds around the text.
        """
        found = self.inner.encode(text, add_special_tokens=add_marks)
        return found.ids, [end for _, end in found.offsets]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return self.inner.decode(list(tokens))

    def save(self, folder: pathlib.Path) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json`."""
        folder.mkdir(parents=True, exist_ok=True)
        self.inner.save(str(folder / "tokenizer.json"))
        settings = {x: y for x, y in self.settings.items() if x not in _LOCAL_PATHS}
        text = json.dumps(settings, indent=2) + "\n"
        (folder / "tokenizer_config.json").write_text(text, "utf-8")


def from_folder(folder: pathlib.Path) -> Tokenizer:
    """Reads `tokenizer.json`, and the settings and chat template if there are any."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"A folder of a model must have tokenizer.json; got {folder}, which has "
            "none. Save a fast tokenizer there: transformers' "
            "AutoTokenizer.save_pretrained writes this file."
        )
    tokenizers = need("tokenizers")
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing more specific
        raise ValueError(
            f"{path} must be a tokenizer; got {error}. Is the file complete?"
        ) from None
    inner.no_truncation()  # texts are cut and padded where batches are made
    inner.no_padding()
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text("utf-8")) if file.exists() else {}
    template = folder / "chat_template.jinja"  # where newer versions write it
    if template.exists():
        settings["chat_template"] = template.read_text("utf-8")
    return Tokenizer(inner, settings)


def from_gguf(settings: Mapping[str, Any]) -> Tokenizer:
    """Builds the byte-level tokenizer that a GGUF file describes."""
    _check_kind(settings)
    tokenizers = need("tokenizers")
    tokens = settings["tokenizer.ggml.tokens"]
    merges = [tuple(x.split(" ")) for x in settings["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    bytes_of_words = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    steps = [bytes_of_words]
    if _SPLITS_DIGITS[settings["tokenizer.ggml.pre"]]:
        steps = [tokenizers.pre_tokenizers.Digits(individual_digits=True), *steps]
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(steps)
    inner.decoder = tokenizers.decoders.ByteLevel()
    _add_special_tokens(inner, tokens, settings.get("tokenizer.ggml.token_type", []))
    if settings.get("tokenizer.ggml.add_bos_token"):
        begin = settings["tokenizer.ggml.bos_token_id"]
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{tokens[begin]} $A", special_tokens=[(tokens[begin], begin)]
        )
    return Tokenizer(inner, _settings_of_transformers(settings))


def _check_kind(settings: Mapping[str, Any]) -> None:
    model, pre = (settings.get(f"tokenizer.ggml.{x}") for x in ("model", "pre"))
    if model != "gpt2" or pre not in _SPLITS_DIGITS:
        raise ValueError(
            'tokenizer.ggml.model must be "gpt2" and tokenizer.ggml.pre one of '
            f"{', '.join(_SPLITS_DIGITS)}; got {model!r} and {pre!r}. Other tokenizers "
            "of GGUF files are not implemented: use the tokenizer.json of the model."
        )


def _add_special_tokens(inner: Any, tokens: list[str], types: list[int]) -> None:
    """Tells the tokenizer which tokens are never cut, and which are not text."""
    added = need("tokenizers").AddedToken
    for token, kind in zip(tokens, types, strict=False):
        if kind == _CONTROL:
            inner.add_special_tokens([added(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            inner.add_tokens([added(token, normalized=False)])


def _settings_of_transformers(settings: Mapping[str, Any]) -> dict[str, Any]:
    tokens = settings["tokenizer.ggml.tokens"]
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}
    numbers = {
        x: settings.get(f"tokenizer.ggml.{key}_token_id") for x, key in names.items()
    }
    found = {"tokenizer_class": "PreTrainedTokenizerFast"}
    found |= {x: tokens[number] for x, number in numbers.items() if number is not None}
    if "tokenizer.chat_template" in settings:
        found["chat_template"] = settings["tokenizer.chat_template"]
    return found
