"""The sizes and constants of a model, as `config.json` and GGUF files state them."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes and constants of a model.

    Rates of dropout are not read: the models have none.

    Attributes:
      architecture: "llama", "gpt2" or "bert".
      vocabulary_size: the number of rows of the embedding.
      width: the number of channels between the layers.
      num_layers: the number of layers.
      num_heads: the number of query heads.
      num_key_value_heads: the number of key and value heads. Each serves a group of
        `num_heads / num_key_value_heads` query heads.
      head_width: the number of channels of a head.
      hidden_width: the number of channels inside the feed-forward part of a layer.
      context: the largest number of tokens.
      norm_epsilon: the constant under the root of the normalisations.
      rope_base: the base of the rotary positions of a Llama. The others learn their
        positions, and do not use it.
      num_segments: the number of kinds of text that a BERT tells apart.
      has_tied_embeddings: whether the embedding also computes the logits of a decoder.
      begin_token: the token that starts a text, if there is one.
      end_tokens: the tokens that end a text.
    """

    architecture: str
    vocabulary_size: int
    width: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    head_width: int
    hidden_width: int
    context: int
    norm_epsilon: float
    rope_base: float = 10000.0
    num_segments: int = 1
    has_tied_embeddings: bool = True
    begin_token: int | None = None
    end_tokens: tuple[int, ...] = ()

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and (type(value) is not int or value < 1):
                raise ValueError(
                    f"{field.name} must be an integer of at least 1; got {value!r}. "
                    "Correct the configuration of the model."
                )
        if self.num_heads % self.num_key_value_heads:
            raise ValueError(
                "num_heads must be a multiple of num_key_value_heads; got "
                f"{self.num_heads} and {self.num_key_value_heads}. Correct the "
                "configuration of the model."
            )
        if self.architecture == "llama" and self.head_width % 2:
            raise ValueError(
                "head_width must be even, because rotary positions turn pairs of "
                f"channels; got {self.head_width}. Correct the configuration."
            )


# Where config.json has the fields. The others are read by functions below.
_KEYS = {
    "llama": {
        "vocabulary_size": "vocab_size",
        "width": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_key_value_heads": "num_key_value_heads",
        "head_width": "head_dim",
        "hidden_width": "intermediate_size",
        "context": "max_position_embeddings",
        "norm_epsilon": "rms_norm_eps",
        "has_tied_embeddings": "tie_word_embeddings",
    },
    "gpt2": {
        "vocabulary_size": "vocab_size",
        "width": "n_embd",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "hidden_width": "n_inner",
        "context": "n_positions",
        "norm_epsilon": "layer_norm_epsilon",
        "has_tied_embeddings": "tie_word_embeddings",
    },
    "bert": {
        "vocabulary_size": "vocab_size",
        "width": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "hidden_width": "intermediate_size",
        "context": "max_position_embeddings",
        "norm_epsilon": "layer_norm_eps",
        "num_segments": "type_vocab_size",
    },
}

# Settings of config.json that this code implements one value of, which is the default.
_ONLY_VALUES = {
    "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "gpt2": {
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    "bert": {
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "is_decoder": False,
    },
}

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "bert": "BertModel",
}


def from_huggingface(settings: Mapping[str, Any]) -> Config:
    """Reads the contents of a `config.json`."""
    architecture = settings.get("model_type")
    if architecture not in _KEYS:
        raise ValueError(
            f"model_type in config.json must be one of {', '.join(_KEYS)}; got "
            f"{architecture!r}. Other architectures are not implemented."
        )
    _check_only_values(architecture, settings)
    given = {
        field: settings[key]
        for field, key in _KEYS[architecture].items()
        if settings.get(key) is not None
    }
    if architecture == "llama":
        given["rope_base"] = _rope_base(settings)
    ends = settings.get("eos_token_id")
    given |= {
        "architecture": architecture,
        "begin_token": settings.get("bos_token_id"),
        "end_tokens": tuple(ends) if isinstance(ends, list) else _as_tuple(ends),
    }
    return complete(given, _KEYS[architecture])


def _as_tuple(value: int | None) -> tuple[int, ...]:
    return () if value is None else (value,)


def complete(given: dict[str, Any], keys: Mapping[str, str]) -> Config:
    """Fills in the fields that files may leave out; `keys` names them in errors."""
    heads, width = given.get("num_heads"), given.get("width")
    is_llama = given["architecture"] == "llama"
    if isinstance(heads, int) and isinstance(width, int) and heads > 0:
        defaults = {
            "num_key_value_heads": heads,
            "head_width": width // heads,
            "has_tied_embeddings": not is_llama,
        }
        defaults |= {} if is_llama else {"hidden_width": 4 * width}
        given = defaults | given
    needed = [
        field.name
        for field in dataclasses.fields(Config)
        if field.default is dataclasses.MISSING
    ]
    missing = [keys.get(name, name) for name in needed if name not in given]
    if missing:
        raise ValueError(
            f"The configuration must state {', '.join(missing)}; got none. Is the file "
            "complete?"
        )
    return Config(**given)


def _check_only_values(architecture: str, settings: Mapping[str, Any]) -> None:
    for key, value in _ONLY_VALUES[architecture].items():
        if settings.get(key, value) != value:
            raise ValueError(
                f"{key} in config.json must be {value!r}; got {settings[key]!r}. Other "
                "values are not implemented."
            )


def _rope_base(settings: Mapping[str, Any]) -> float:
    """The base, in the form of version 5 of transformers or of earlier ones."""
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f'rope_type in config.json must be "default"; got {kind!r}. Scaled rotary '
            "positions are not implemented."
        )
    return float(rope.get("rope_theta", settings.get("rope_theta", 10000.0)))


def to_huggingface(config: Config) -> dict[str, Any]:
    """The contents of a `config.json`, for every version of transformers."""
    ends = config.end_tokens
    settings = {
        "architectures": [_CLASSES[config.architecture]],
        "model_type": config.architecture,
        "bos_token_id": config.begin_token,
        "eos_token_id": ends[0] if len(ends) == 1 else list(ends) or None,
    }
    fields = _KEYS[config.architecture].items()
    settings |= {key: getattr(config, field) for field, key in fields}
    if config.architecture == "llama":
        settings["rope_theta"] = config.rope_base
    return settings | _ONLY_VALUES[config.architecture]
