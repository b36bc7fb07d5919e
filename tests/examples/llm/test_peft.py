"""That the library PEFT loads saved adapters, where it is installed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lora.subjects import trained

from dpmp import lora
from examples import llm


@pytest.mark.parametrize("model_name", ["llama", "gpt2"])
@pytest.mark.filterwarnings("default")
@jax.numpy_dtype_promotion("standard")
def test_peft_computes_the_same_logits(folder, model_name, tmp_path):
    peft = pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = llm.load(folder)
    adapters = trained(lora.init(jax.random.key(0), model.params, 2, "layers/.*kernel"))
    lora.save(
        tmp_path / "adapter",
        adapters,
        model.params,
        initial=None,
        names=functools.partial(llm.huggingface_name, architecture=model_name),
        config={"task_type": "CAUSAL_LM", "fan_in_fan_out": model_name == "gpt2"},
    )
    tokens = np.arange(12)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        given = theirs(torch.tensor(tokens[None])).logits[0].numpy()
    expected = lora.apply(model.apply, model.params)(adapters, jnp.asarray(tokens))
    np.testing.assert_allclose(given, expected, atol=1e-4)
    unchanged = model.apply(model.params, jnp.asarray(tokens))
    assert np.max(np.abs(given - unchanged)) > 0.01

    loaded = lora.load(tmp_path / "adapter", model.params)
    jax.tree.map(np.testing.assert_array_equal, loaded, adapters)


@pytest.mark.parametrize(
    ("model_name", "targets", "attention"),
    [
        ("llama", ["q_proj", "down_proj"], ["query"]),
        ("gpt2", ["c_attn", "mlp.c_proj"], ["query", "key", "value"]),
    ],
)
@pytest.mark.filterwarnings("default")
@jax.numpy_dtype_promotion("standard")
def test_adapters_that_peft_saves_are_loaded(
    folder, model_name, targets, attention, tmp_path
):
    peft = pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(
        r=2,
        lora_alpha=6,
        target_modules=targets,
        bias="none",
        fan_in_fan_out=model_name == "gpt2",
    )
    theirs = peft.get_peft_model(base, config).eval()
    torch.manual_seed(0)
    for name, x in theirs.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(x, std=0.1)
    theirs.save_pretrained(tmp_path / "adapter")
    tokens = np.arange(12)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens[None])).logits[0].numpy()
    model = llm.load(folder)

    names = functools.partial(llm.huggingface_name, architecture=model_name)
    adapters = lora.load(tmp_path / "adapter", model.params, names=names)
    paths = {f"layers/attention/{x}/kernel" for x in attention}
    paths.add("layers/feed_forward/down/kernel")
    assert {path for path, _ in adapters.axes} == paths
    given = lora.apply(model.apply, model.params)(adapters, jnp.asarray(tokens))
    np.testing.assert_allclose(given, expected, atol=1e-4)
