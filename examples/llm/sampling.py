"""Writes text with a model, one token after another."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .losses import Apply
from .pretrained import Pretrained

_LENGTHS = 64  # a text is padded to a multiple of it, so that programs are used again


def generate(
    model: Pretrained,
    prompt: str,
    *,
    num_tokens: int,
    temperature: float = 0.0,
    key: jax.Array | None = None,
) -> str:
    """Continues a text.

    Each token needs a pass over the whole text, which is enough to look at a model.

    Args:
      model: the model and its tokenizer.
      prompt: the text to continue, of at least one token.
      num_tokens: how many tokens to add. An end token stops earlier.
      temperature: divides the logits. At 0, each token is the most probable one.
      key: the random key, which temperatures above 0 need.

    Returns:
      The added text.

    Raises:
      ValueError: the prompt is empty, the text is too long for the model, or a key is
        missing.
    """
    start = model.tokenizer.encode(prompt)
    end = len(start) + num_tokens
    _check(start, end, model.config.context, temperature, key)
    key = key if temperature > 0 else None
    padded = min(-(-end // _LENGTHS) * _LENGTHS, model.config.context)
    tokens = np.zeros(padded, np.int32)
    tokens[: len(start)] = start
    for i in range(len(start), end):
        noise = None if key is None else jax.random.fold_in(key, i)
        tokens[i] = _next(model.apply, model.params, tokens, i, temperature, noise)
        if tokens[i] in model.config.end_tokens:
            end = i
            break
    return model.tokenizer.decode(tokens[len(start) : end].tolist())


def _check(
    start: list[int], end: int, context: int, temperature: float, key: Any
) -> None:
    if not start:
        raise ValueError(
            "prompt must have at least one token; got none. Begin the text yourself."
        )
    if end > context:
        raise ValueError(
            f"The prompt and num_tokens must have at most {context} tokens together; "
            f"got {end}. Shorten one of them."
        )
    if temperature > 0 and key is None:
        raise ValueError(
            f"key must be a random key at temperatures above 0; got None and "
            f"{temperature}. Pass key=jax.random.key(0), or temperature=0."
        )


@functools.partial(jax.jit, static_argnums=0)
def _next(
    apply: Apply, params: Any, tokens: Any, i: int, temperature: float, key: Any
) -> jax.Array:
    """The token at position i, given those before it."""
    logits = apply(params, tokens)[i - 1]
    if key is None:
        return jnp.argmax(logits)
    return jax.random.categorical(key, logits / temperature)
