"""Prompts with completions, and chats: the model learns to write a part of the text.

A chat becomes a text by the chat template of the model, which is a program in the
language Jinja. Error messages name fields of a record, and never what they hold.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ._packages import need
from .tokenizer import Tokenizer

Message = Mapping[str, str]

_FORMS = {"text", "completion", "messages"}
_CONVERT = 'Write the record as "prompt" and "completion" instead.'
_MANY_FORMS = 'must have one of the fields "text", "completion" and "messages" only.'
_NO_FORM = (
    'must be a string, or an object with the string field "text", with the string '
    'fields "prompt" and "completion", or with a list "messages" of objects with the '
    'string fields "role" and "content".'
)


class Dialogue(NamedTuple):
    """A text in which the model learns to write the completions only.

    Attributes:
      text: the whole text.
      completions: where each completion starts and ends, in characters.
      has_marks: whether the text itself has the marks of the tokenizer, such as a token
        that begins each text.
    """

    text: str
    completions: tuple[tuple[int, int], ...]
    has_marks: bool


def parse_record(tokenizer: Tokenizer, value: Any) -> str | Dialogue:
    """Makes a record from a JSON value, which has one of these forms.

        "Hello." or {"text": "Hello."}
        {"prompt": "2 + 2 =", "completion": " 4"}
        {"messages": [{"role": "user", "content": "2 + 2?"},
                      {"role": "assistant", "content": "4"}]}

    The end token of the tokenizer, if it has one, follows a completion.

    Raises:
      ValueError: the value has another form, or the chat template cannot render it.
    """
    if isinstance(value, dict) and len(_FORMS & value.keys()) > 1:
        raise ValueError(_MANY_FORMS)
    match value:
        case str(text) | {"text": str(text)}:
            return text
        case {"prompt": str(prompt), "completion": str(completion)}:
            end = _special_tokens(tokenizer).get("eos_token", "")
            text = prompt + completion + end
            return Dialogue(text, ((len(prompt), len(text)),), has_marks=False)
        case {"messages": [*messages]} if all(map(_is_message, messages)):
            return _chat(tokenizer, messages)
    raise ValueError(_NO_FORM)


def _is_message(value: Any) -> bool:
    match value:
        case {"role": str(), "content": str()}:
            return True
    return False


def _chat(tokenizer: Tokenizer, messages: Sequence[Message]) -> Dialogue:
    """A chat, whose completions are the messages of the assistant.

    A completion includes the mark of its end, but no white space after the mark.
    """
    text = render_chat(tokenizer, messages)
    completions = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render_chat(tokenizer, messages[:i], asks_for_reply=True)
        after = render_chat(tokenizer, messages[: i + 1])
        if not (text.startswith(after) and after.startswith(before)):
            raise ValueError(
                "the chat template of the model must add each message at the end of "
                f"the text; for these messages, it does not. {_CONVERT}"
            )
        completions.append((len(before), len(after.rstrip())))
    if not completions:
        raise ValueError('must have a message with the role "assistant".')
    return Dialogue(text, tuple(completions), has_marks=True)


def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], *, asks_for_reply: bool = False
) -> str:
    """The text of a chat; `asks_for_reply` adds the start of an assistant's message.

    Raises:
      ValueError: there is no chat template, or it does not render these messages.
    """
    template = tokenizer.settings.get("chat_template")
    if isinstance(template, list):  # several, with names
        template = {x["name"]: x["template"] for x in template}.get("default")
    if not isinstance(template, str):
        raise ValueError(
            "the model must have a chat template for messages; its tokenizer has none. "
            f"Use a model that was tuned for chats. {_CONVERT}"
        )
    plain = [{"role": x["role"], "content": x["content"]} for x in messages]
    environment = _environment()
    try:
        return environment.from_string(template).render(
            messages=plain,
            add_generation_prompt=asks_for_reply,
            **_special_tokens(tokenizer),
        )
    except Exception as error:  # a template is a program, and may raise anything
        raise ValueError(
            "the chat template of the model must render the messages; it raised "
            f"{type(error).__name__}. Are roles in the order that the model knows? "
            f"{_CONVERT}"
        ) from None


@functools.cache
def _environment() -> Any:
    """The environment of Jinja for which chat templates are written."""
    environment = need("jinja2.sandbox").ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    # The filter of Jinja escapes characters for HTML.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _refuse
    return environment


def _refuse(message: str) -> None:
    raise ValueError(message)  # never shown, because it may hold parts of a record


def _special_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """The texts of the special tokens that the tokenizer has."""
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    found = {x: tokenizer.settings[x] for x in names if tokenizer.settings.get(x)}
    return {
        name: token["content"] if isinstance(token, Mapping) else token
        for name, token in found.items()
    }
