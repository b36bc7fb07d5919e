"""That the example trains, saves what others load, and notices mistakes."""

import json

import finetune_llm as example
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lora.subjects import trained

from dpmp import lora
from dpmp.planning import _plans


@pytest.fixture
def chats(llama, tmp_path):
    """Chats, for a model with a chat template."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (llama / "chat_template.jinja").write_text(template)
    path = tmp_path / "chats.jsonl"
    answer = {"role": "assistant", "content": "the hen"}
    chats = [[{"role": "user", "content": f"in {i}"}, answer] for i in range(300)]
    path.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    return path


@pytest.fixture
def flags(llama, records, tmp_path):
    return ("--model", llama, "--data", records, "--output", tmp_path / "out",
            "--delta", "1e-4", "--steps", "2", "--batch-size", "16", "--length", "8",
            "--rank", "2", "--prompt", "the", "--num-tokens", "4")  # fmt: skip


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")  # flax needs it
def test_a_run_is_saved_and_loaded_again(run, tmp_path, llama, flags, capsys):
    run(example, *flags, "--compare", "--base-name", "someone/llama")
    printed = capsys.readouterr().out
    assert "differentially private" in printed
    text = (tmp_path / "out" / "report.json").read_text()
    assert str(tmp_path) not in text
    report = json.loads(text)
    assert report["losses"] in printed
    assert report["epsilon"] <= 8
    assert report["delta"] == 1e-4
    assert {*report["nats_per_token"]} == {"before", "private"}
    assert report["without_privacy"]["nats_per_token"] > 0
    assert "without any protection" in report["statement"]

    model = example.llm.load(llama, dtype=jnp.bfloat16)
    merged = example.llm.load(tmp_path / "out" / "merged")
    with jax.numpy_dtype_promotion("standard"):
        adapters = lora.load(tmp_path / "out" / "adapter", model.params)
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), model.params)
        tokens = jnp.arange(8)
        expected = lora.apply(model.apply, wide)(adapters.for_base(wide), tokens)
        given = merged.apply(merged.params, tokens)
        np.testing.assert_allclose(given, expected, atol=1e-5)
        assert np.max(np.abs(given - model.apply(wide, tokens))) > 1e-3
    config = json.loads((tmp_path / "out/adapter/adapter_config.json").read_text())
    assert "model.layers.0.self_attn.q_proj" in config["target_modules"]
    assert config["base_model_name_or_path"] == "someone/llama"

    run(example, "--generate", tmp_path / "out", "--model", llama, *flags[-4:])
    generated = capsys.readouterr().out.strip()
    assert generated.startswith("the")
    assert generated in printed


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")  # flax needs it
def test_a_model_of_chats_replies(run, tmp_path, llama, flags, chats, capsys):
    run(example, *flags, "--data", chats, "--seed", "1")
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["is_chat"]
    run(example, "--generate", tmp_path / "out", "--model", llama, *flags[-4:],
        "--seed", "1")  # fmt: skip
    generated = capsys.readouterr().out.strip()
    assert generated.startswith("the\n")
    assert generated in printed


def test_losses_say_of_which_tokens_they_are():
    is_target = np.zeros((3, 8), bool)
    is_target[:2, 1:4] = True
    text = example.describe_losses({"is_target": is_target}, 8)
    assert "means over the 6 tokens to predict in 3 held-out" in text
    assert "1 of these records have no token to predict" in text
    assert "no token" not in example.describe_losses({"is_target": is_target[:2]}, 8)
    with pytest.raises(SystemExit, match=r"--length must be so large.* got 8"):
        example.describe_losses({"is_target": is_target[2:]}, 8)


def test_the_batch_and_the_kind_of_noise_are_chosen(monkeypatch):
    monkeypatch.setattr(_plans, "_BANDS", (2,))  # each takes a search

    def mechanism_of(noise):
        flags = ["--batch-size", "128", "--steps", "4", "--noise", noise]
        monkeypatch.setattr("sys.argv", ["finetune_llm.py", *flags])
        args = example.parse_args()
        mechanism = example.make_mechanism(args, 32, 1000)
        # At most a quarter of the records.
        assert args.batch_size == mechanism.expected_batch_size == 8
        assert mechanism.guarantee().epsilon <= 8
        return mechanism

    assert mechanism_of("least").strategy.stored_steps == 0  # of the inverse
    assert mechanism_of("2 bands").strategy.bands == 2
    with pytest.raises(SystemExit, match="a name from this list; got '5 bands'"):
        mechanism_of("5 bands")


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")  # flax needs it
def test_an_adapter_is_served_with_the_tokenizer_of_training(run, llama, tmp_path):
    model = example.llm.load(llama, dtype=jnp.bfloat16)
    adapters = trained(
        lora.init(jax.random.key(0), model.params, 2, "attention/query/kernel")
    )
    folder, names = tmp_path / "out", example.llm.huggingface_name
    lora.save(folder / "adapter", adapters, model.params, initial=None, names=names)
    report = {"tokenizer": model.tokenizer.digest, "is_chat": False}
    report["settings"] = {"packed": False}
    (folder / "report.json").write_text(json.dumps(report))
    flags = ("--generate", folder, "--model", llama, "--prompt", "the")
    run(example, *flags, "--num-tokens", "2")
    other = jax.tree.map(lambda x: 2 * x, model.params)
    moved = adapters.for_base(other)
    lora.save(folder / "adapter", moved, other, initial=None, names=names)
    with pytest.raises(SystemExit, match=r"--generate: .* was fine-tuned as --model"):
        run(example, *flags)
    file = llama / "tokenizer.json"
    other = json.loads(file.read_text()) | {"pre_tokenizer": {"type": "Whitespace"}}
    file.write_text(json.dumps(other))
    with pytest.raises(SystemExit, match="the tokenizer must be that of training"):
        run(example, *flags)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--data", "nowhere.jsonl"], "--data: there is no file"),
        (["--delta", "0.1"], "--delta must be below 1 / 2"),
        (["--output", __file__], "--output must be a directory"),
        (["--generate", "nowhere"], "--generate: nowhere has no report"),
        (["--targets", "no such array"], "at least one array must be selected"),
        (["--model", "nowhere"], "nowhere"),
    ],
)
@jax.numpy_dtype_promotion("standard")  # flax needs it
def test_bad_flags_stop_it_before_any_training(run, monkeypatch, flags, more, message):
    monkeypatch.setattr(example, "train", lambda *_: pytest.fail("it trained"))
    with pytest.raises((SystemExit, ValueError, FileNotFoundError), match=message):
        run(example, *flags, *more)
