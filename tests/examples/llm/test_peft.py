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
