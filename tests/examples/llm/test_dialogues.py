"""That dialogues become the texts and targets that the guide describes."""

import json

import pytest

from examples import llm
from examples.llm import tokenizer as tokenizers

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nHelp.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHORT = (
    "{{ bos_token }}{% for m in messages %}{{ m.role[0] }}.{{ m.content }}"
    "{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    "{{ 'a.' if add_generation_prompt }}"
)


def chat(*messages):
    pairs = (message.split(": ") for message in messages)
    return {"messages": [{"role": role, "content": text} for role, text in pairs]}


TWO_TURNS = chat("user: the 12", "assistant: hen", "user: in", "assistant: the")


@pytest.fixture
def make(gguf_settings):
    """Makes a small tokenizer with a chat template, and more settings."""

    def make_with(template, **more):
        more = {f"tokenizer.ggml.{name}": value for name, value in more.items()}
        given = gguf_settings | more
        if template is not None:
            given["tokenizer.chat_template"] = template
        return tokenizers.from_gguf(given)

    return make_with


def targets(tokenizer, record, length=40):
    """The tokens of a record, and those that the model shall predict."""
    batch = llm.make_batch(tokenizer, [record], length)
    tokens, is_target = batch["tokens"][0], batch["is_target"][0]
    words = [tokenizer.inner.id_to_token(token) for token in tokens]
    return words, [word for word, x in zip(words, is_target, strict=True) if x]


def test_the_completions_of_a_chat_end_with_the_mark_of_their_end(make):
    record = llm.parse_record(make(CHATML), TWO_TURNS)
    assert record.text == (
        "<|im_start|>system\nHelp.<|im_end|>\n<|im_start|>user\nthe 12<|im_end|>\n"
        "<|im_start|>assistant\nhen<|im_end|>\n<|im_start|>user\nin<|im_end|>\n"
        "<|im_start|>assistant\nthe<|im_end|>\n"
    )
    completions = [record.text[start:end] for start, end in record.completions]
    assert completions == ["hen<|im_end|>", "the<|im_end|>"]


@pytest.mark.parametrize("add_bos_token", [False, True])
def test_targets_of_a_chat_are_the_tokens_of_the_assistant(make, add_bos_token):
    tokenizer = make(SHORT, add_bos_token=add_bos_token)
    record = llm.parse_record(tokenizer, TWO_TURNS)
    assert record.text == "<s>u.the 12a.hen</s>u.ina.the</s>"
    words, predicted = targets(tokenizer, record)
    assert words[:3] == ["<s>", "u", "."]  # the begin token comes once
    assert predicted == ["he", "n", "</s>", "t", "he", "</s>"]


@pytest.mark.parametrize(
    ("prompt", "completion", "expected", "add_bos_token"),
    [
        ("hen in", " the 1", ["Ġthe", "Ġ", "1", "</s>"], False),
        ("hen in", " the 1", ["Ġthe", "Ġ", "1", "</s>"], True),
        # A token across the start of the completion belongs to it.
        ("a t", "he", ["Ġthe", "</s>"], False),
        # The first token of a text is never a target.
        ("", "hen", ["n", "</s>"], False),
    ],
)
def test_targets_of_a_prompt_are_its_completion_and_the_end(
    make, prompt, completion, expected, add_bos_token
):
    tokenizer = make(None, add_bos_token=add_bos_token)
    value = {"prompt": prompt, "completion": completion}
    record = llm.parse_record(tokenizer, value)
    words, predicted = targets(tokenizer, record)
    assert (words[0] == "<s>") == add_bos_token
    assert predicted == expected


def test_a_record_that_is_cut_off_before_its_completion_has_no_target(make):
    tokenizer = make(SHORT)
    records = [llm.parse_record(tokenizer, x) for x in (TWO_TURNS, {"text": "hen"})]
    assert records[1] == llm.parse_record(tokenizer, "hen") == "hen"
    batch = llm.make_batch(tokenizer, records, 6)
    assert batch["tokens"].shape == (2, 6)
    assert batch["is_target"].any(axis=1).tolist() == [False, True]


def test_a_folder_may_have_its_template_in_a_file_or_in_a_list(llama):
    named = [{"name": "tools", "template": "?"}, {"name": "default", "template": SHORT}]
    settings = {
        "chat_template": named,
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
    }
    (llama / "tokenizer_config.json").write_text(json.dumps(settings))
    expected = "<s>u.the 12a.hen</s>u.ina.the</s>"
    for _ in range(2):
        record = llm.parse_record(tokenizers.from_folder(llama), TWO_TURNS)
        assert record.text == expected
        (llama / "chat_template.jinja").write_text("x" + SHORT)
        expected = "x" + expected


FORM = "must be a string, or an object"
REFUSED = "{{ raise_exception(messages[0].content) }}"


@pytest.mark.parametrize(
    ("template", "value", "message"),
    [
        (SHORT, {"body": "ill"}, FORM),
        (SHORT, {"prompt": "ill"}, FORM),
        (SHORT, {"prompt": "ill", "completion": ["ill"]}, FORM),
        (SHORT, {"messages": ["ill"]}, FORM),
        (SHORT, {"messages": [{"role": "user", "content": None}]}, FORM),
        (SHORT, {"text": "ill", **TWO_TURNS}, "must have one of the fields"),
        (SHORT, chat("user: ill"), 'must have a message with the role "assistant"'),
        (None, chat("assistant: ill"), "must have a chat template.*has none"),
        (CHATML, chat("assistant: ill"), "must add each message at the end"),
        (REFUSED, chat("assistant: ill"), "it raised ValueError"),
        ("{% ill", chat("assistant: ill"), "it raised TemplateSyntaxError"),
        ("{{ ''.__class__.mro() }}", chat("assistant: ill"), "it raised SecurityError"),
    ],
)
def test_other_records_are_refused_without_their_content(
    make, template, value, message
):
    with pytest.raises(ValueError, match=message) as error:
        llm.parse_record(make(template), value)
    assert "ill" not in str(error.value)
    assert error.value.__suppress_context__ or error.value.__context__ is None
