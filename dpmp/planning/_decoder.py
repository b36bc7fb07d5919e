"""A decoder of the Llama or GPT-2 kind, as sizes, shapes and a loss."""

import json
import pathlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.numerics import num_entries

_FEWEST_PARAMETERS = 1_000_000
ADAPTED = "layers/(query|key_value|out)"  # the matrices that LoRA adapts, by name

# Where config.json has the sizes: under the name of Llama, or under that of GPT-2.
_KEYS = {
    "layers": ("num_hidden_layers", "n_layer"),
    "width": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "vocabulary": ("vocab_size",),
}


@dataclass(frozen=True)
class Decoder:
    """The sizes of a decoder."""

    layers: int
    width: int  # the number of channels between the layers
    heads: int  # the number of query heads
    vocabulary: int
    hidden: int  # the number of channels inside the feed-forward part of a layer
    kv_heads: int  # the number of key and value heads
    head_width: int
    positions: int = 0  # the number of learnt positions; 0 for rotary ones
    is_gated: bool = True  # a third feed-forward matrix gates the first
    is_tied: bool = True  # the embedding also computes the logits

    @classmethod
    def of_size(cls, num_parameters: int) -> "Decoder":
        """A decoder of this many parameters, with the proportions of published ones."""
        if num_parameters < _FEWEST_PARAMETERS:
            _validate.fail(
                f"a decoder must have at least {_FEWEST_PARAMETERS} parameters. "
                "Without --parameters, the command plans the noise alone.",
                parameters=num_parameters,
            )
        width = 128 * max(1, round((7 * num_parameters) ** (1 / 3) / 128))
        layer = 13 * width**2 + 2 * width  # 4 for attention, 9 for the gated part
        embedding = min(32_000 * width, num_parameters // 4)
        layers = max(1, (num_parameters - embedding) // layer)
        return cls(
            layers=layers,
            width=width,
            heads=width // 64,
            vocabulary=(num_parameters - layers * layer) // width,  # takes the rest
            hidden=3 * width,
            kv_heads=width // 64,
            head_width=64,
        )

    @classmethod
    def from_config(cls, path: pathlib.Path) -> "Decoder":
        """Reads a config.json of Hugging Face: Llama, Qwen, Mistral, Gemma or GPT-2."""
        try:
            config = json.loads(path.read_text())
            config = config.get("text_config", config)
            found = {
                name: config[next((x for x in names if x in config), names[0])]
                for name, names in _KEYS.items()
            }
        except (OSError, ValueError, KeyError, AttributeError) as error:
            _validate.fail(
                "the configuration must be the config.json of a decoder. Pass the "
                "file of a Llama, Qwen, Mistral, Gemma or GPT-2, or use --parameters.",
                config=str(path),
                reason=f"{type(error).__name__}: {error}",
            )
        experts = sorted(name for name in config if "expert" in name)
        if experts:
            _validate.fail(
                "a decoder must have no mixtures of experts. Use --parameters.",
                config=str(path),
                found=experts,
            )
        width, heads = found["width"], found["heads"]
        kind = str(config.get("model_type"))
        return cls(
            **found,
            hidden=config.get("intermediate_size")
            or config.get("n_inner")
            or 4 * width,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_width=config.get("head_dim") or width // heads,
            positions=config.get("n_positions", 0),
            is_gated="intermediate_size" in config,
            # Files leave out the default of the kind.
            is_tied=config.get("tie_word_embeddings", kind.startswith(("g", "G"))),
        )

    def shapes(self, dtype: Any) -> PyTree:
        """The shapes of all parameters; those of the layers are stacked."""
        width, layers = self.width, self.layers

        def shape(*axes: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(axes, dtype)

        matrices = {
            "query": shape(layers, width, self.heads, self.head_width),
            "key_value": shape(layers, width, 2, self.kv_heads, self.head_width),
            "out": shape(layers, self.heads * self.head_width, width),
            "up": shape(layers, width, self.hidden),
            "down": shape(layers, self.hidden, width),
            "norms": shape(layers, 2, width),
        }
        if self.is_gated:
            matrices["gate"] = shape(layers, width, self.hidden)
        params = {"embed": shape(self.vocabulary, width), "layers": matrices}
        if self.positions:
            params["position"] = shape(self.positions, width)
        if not self.is_tied:
            params["head"] = shape(width, self.vocabulary)
        return params

    @property
    def num_parameters(self) -> int:
        """The number of entries of all parameters."""
        return num_entries(self.shapes(jnp.float32))

    def num_adapted(self, rank: int) -> int:
        """The number of entries of adapters of the matrices of attention."""
        queries = self.heads * self.head_width
        keys_and_values = 2 * self.kv_heads * self.head_width
        rows_and_columns = 3 * self.width + 2 * queries + keys_and_values
        return rank * self.layers * rows_and_columns

    def loss_fn(
        self, params: PyTree, tokens: jax.Array, *, remat: bool = False
    ) -> jax.Array:
        """The next-token loss. With `remat`, gradients compute layers again."""
        # Without rotary positions, which need no parameters and little memory.
        x = params["embed"][tokens]
        if self.positions:
            x += params["position"][: tokens.shape[1]]
        layer = jax.checkpoint(_layer) if remat else _layer
        x, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"])
        head = params["embed"].T if self.is_tied else params["head"]
        logits = (x @ head)[:, :-1].astype(jnp.float32)
        losses = optax.losses.softmax_cross_entropy_with_integer_labels
        return jnp.mean(losses(logits, tokens[:, 1:]))


def _layer(x: jax.Array, p: PyTree) -> jax.Array:
    h = _normalised(x, p["norms"][0])
    q = jnp.einsum("bti,ihd->bthd", h, p["query"])
    k, v = jnp.einsum("bti,ichd->cbthd", h, p["key_value"])
    q = q.reshape(*k.shape[:3], -1, k.shape[-1])  # g: the queries of a key
    scores = jnp.einsum("bthgd,bshd->bhgts", q, k).astype(jnp.float32)
    causal = jnp.tri(x.shape[1], dtype=bool)
    weights = jax.nn.softmax(jnp.where(causal, scores / q.shape[-1] ** 0.5, -1e9))
    mixed = jnp.einsum("bhgts,bshd->bthgd", weights.astype(x.dtype), v)
    x = x + mixed.reshape(*x.shape[:2], -1) @ p["out"]
    h = _normalised(x, p["norms"][1])
    hidden = h @ p["up"]
    hidden *= jax.nn.silu(h @ p["gate"]) if "gate" in p else jax.nn.sigmoid(hidden)
    return x + hidden @ p["down"]


def _normalised(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + 1e-6)).astype(x.dtype) * scale
