"""What the files of Hugging Face call the parameters of each architecture."""

from ._names import Names

_LAYER = "model.layers.{}."
_H = "transformer.h.{}."
_B = "encoder.layer.{}."
_SELF = _B + "attention.self."

NAMES = {
    "llama": Names(
        {
            "embed/embedding": "model.embed_tokens.weight",
            "layers/attention_norm/scale": _LAYER + "input_layernorm.weight",
            "layers/attention/query/kernel": _LAYER + "self_attn.q_proj.weight",
            "layers/attention/key/kernel": _LAYER + "self_attn.k_proj.weight",
            "layers/attention/value/kernel": _LAYER + "self_attn.v_proj.weight",
            "layers/attention/out/kernel": _LAYER + "self_attn.o_proj.weight",
            "layers/feed_forward_norm/scale": _LAYER
            + "post_attention_layernorm.weight",
            "layers/feed_forward/gate/kernel": _LAYER + "mlp.gate_proj.weight",
            "layers/feed_forward/up/kernel": _LAYER + "mlp.up_proj.weight",
            "layers/feed_forward/down/kernel": _LAYER + "mlp.down_proj.weight",
            "norm/scale": "model.norm.weight",
            "head/kernel": "lm_head.weight",
        },
        outputs_first=True,
        ignored=("rotary_emb.inv_freq", "lm_head.weight"),
    ),
    "gpt2": Names(
        {
            "embed/embedding": "transformer.wte.weight",
            "position/embedding": "transformer.wpe.weight",
            "layers/attention_norm/scale": _H + "ln_1.weight",
            "layers/attention_norm/bias": _H + "ln_1.bias",
            "layers/attention/query/kernel": _H + "attn.c_attn.weight",
            "layers/attention/key/kernel": _H + "attn.c_attn.weight",
            "layers/attention/value/kernel": _H + "attn.c_attn.weight",
            "layers/attention/query/bias": _H + "attn.c_attn.bias",
            "layers/attention/key/bias": _H + "attn.c_attn.bias",
            "layers/attention/value/bias": _H + "attn.c_attn.bias",
            "layers/attention/out/kernel": _H + "attn.c_proj.weight",
            "layers/attention/out/bias": _H + "attn.c_proj.bias",
            "layers/feed_forward_norm/scale": _H + "ln_2.weight",
            "layers/feed_forward_norm/bias": _H + "ln_2.bias",
            "layers/feed_forward/up/kernel": _H + "mlp.c_fc.weight",
            "layers/feed_forward/up/bias": _H + "mlp.c_fc.bias",
            "layers/feed_forward/down/kernel": _H + "mlp.c_proj.weight",
            "layers/feed_forward/down/bias": _H + "mlp.c_proj.bias",
            "norm/scale": "transformer.ln_f.weight",
            "norm/bias": "transformer.ln_f.bias",
            "head/kernel": "lm_head.weight",
        },
        outputs_first=False,
        ignored=("attn.bias", "attn.masked_bias", "lm_head.weight"),
    ),
    "bert": Names(
        {
            "embed/embedding": "embeddings.word_embeddings.weight",
            "position/embedding": "embeddings.position_embeddings.weight",
            "segment/embedding": "embeddings.token_type_embeddings.weight",
            "norm/scale": "embeddings.LayerNorm.weight",
            "norm/bias": "embeddings.LayerNorm.bias",
            "layers/attention/query/kernel": _SELF + "query.weight",
            "layers/attention/query/bias": _SELF + "query.bias",
            "layers/attention/key/kernel": _SELF + "key.weight",
            "layers/attention/key/bias": _SELF + "key.bias",
            "layers/attention/value/kernel": _SELF + "value.weight",
            "layers/attention/value/bias": _SELF + "value.bias",
            "layers/attention/out/kernel": _B + "attention.output.dense.weight",
            "layers/attention/out/bias": _B + "attention.output.dense.bias",
            "layers/attention_norm/scale": _B + "attention.output.LayerNorm.weight",
            "layers/attention_norm/bias": _B + "attention.output.LayerNorm.bias",
            "layers/feed_forward/up/kernel": _B + "intermediate.dense.weight",
            "layers/feed_forward/up/bias": _B + "intermediate.dense.bias",
            "layers/feed_forward/down/kernel": _B + "output.dense.weight",
            "layers/feed_forward/down/bias": _B + "output.dense.bias",
            "layers/feed_forward_norm/scale": _B + "output.LayerNorm.weight",
            "layers/feed_forward_norm/bias": _B + "output.LayerNorm.bias",
            "pool/kernel": "pooler.dense.weight",
            "pool/bias": "pooler.dense.bias",
        },
        outputs_first=True,
        ignored=("embeddings.position_ids",),
    ),
}


def huggingface_name(
    path: str, layer: int, architecture: str = "llama"
) -> str | tuple[str, int, int] | None:
    """The module of transformers that has the kernel at `path` in one layer.

    >>> huggingface_name("layers/attention/query/kernel", 3)
    'model.layers.3.self_attn.q_proj'

    If the kernel is one of several in a module, its place among them comes with it:

    >>> huggingface_name("layers/attention/key/kernel", 3, "gpt2")
    ('transformer.h.3.attn.c_attn', 1, 3)

    The result is None for arrays that are no kernels, such as biases.
    """
    names = NAMES[architecture]
    if path not in names.table:
        raise ValueError(
            f"path must be one of a {architecture}; got {path!r}. The paths are "
            f"{', '.join(names.table)}."
        )
    if not path.endswith("kernel"):
        return None
    module = names.table[path].format(layer).rpartition(".")[0]
    parts = names.parts(path)
    return module if len(parts) == 1 else (module, parts.index(path), len(parts))
