"""Language models in JAX whose weights exist: Llama, GPT-2 and BERT.

    from examples import llm

    model = llm.load("path/of/a/folder", dtype=jnp.bfloat16)
    logits = model.apply(model.params, tokens)
    llm.save("path/of/another/folder", model._replace(params=trained))

A model is loaded from a folder in the layout of Hugging Face, or from a GGUF file, and
saved as a folder that transformers loads. The extra `llm` has the packages:
`pip install '.[llm]'`.
"""

from . import _packages as _packages  # first, because it looks for flax
from ._huggingface_names import huggingface_name
from .dialogues import Dialogue, parse_record, render_chat
from .gguf_files import installed_gguf
from .losses import make_batch, mean_nats, nats_per_token, summed_nats
from .pretrained import Pretrained, load, save
from .sampling import generate, generate_batch
from .tokenizer import Tokenizer

__all__ = [
    "Dialogue",
    "Pretrained",
    "Tokenizer",
    "generate",
    "generate_batch",
    "huggingface_name",
    "installed_gguf",
    "load",
    "make_batch",
    "mean_nats",
    "nats_per_token",
    "parse_record",
    "render_chat",
    "save",
    "summed_nats",
]
