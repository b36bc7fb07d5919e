"""Writes texts with a model, one token after another.

The keys and values of earlier tokens are computed once, and stay in a cache.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._config import Config
from .layers import Cache
from .pretrained import Pretrained

_LENGTHS = 64  # texts are padded to a multiple of it, so that programs are used again


def generate(
    model: Pretrained,
    prompt: str,
    *,
    num_tokens: int,
    temperature: float = 0.0,
    key: jax.Array | None = None,
) -> str:
    """Continues one text; see `generate_batch`."""
    (text,) = generate_batch(
        model, [prompt], num_tokens=num_tokens, temperature=temperature, key=key
    )
    return text


def generate_batch(
    model: Pretrained,
    prompts: Sequence[str],
    *,
    num_tokens: int,
    temperature: float = 0.0,
    key: jax.Array | None = None,
) -> list[str]:
    """Continues several texts at once.

    Args:
      model: the model and its tokenizer.
      prompts: the texts to continue, of at least one token each.
      num_tokens: how many tokens to add to each text. An end token stops earlier.
      temperature: divides the logits. At 0, each token is the most probable one.
      key: the random key, which temperatures above 0 need.

    Returns:
      The added texts.

    Raises:
      ValueError: a prompt is empty, a text is too long for the model, or a key is
        missing.
    """
    config, starts = model.config, [model.tokenizer.encode(x) for x in prompts]
    for start in starts:
        _check(len(start), len(start) + num_tokens, config.context, temperature, key)
    lengths = np.array([len(start) for start in starts], np.int32)
    padded = -(-(max(lengths) + num_tokens) // _LENGTHS) * _LENGTHS
    tokens = np.zeros((len(starts), min(padded, config.context)), np.int32)
    for row, start in zip(tokens, starts, strict=True):
        row[: len(start)] = start
    # All prompts have these tokens. Loops add the last one of a prompt, and its rest.
    shared = (min(lengths) - 1) // _LENGTHS * _LENGTHS
    found = _continue(
        model.apply,
        config,
        shared,
        model.params,
        tokens,
        lengths,
        max(lengths) + num_tokens,
        temperature,
        key if temperature > 0 else None,
    )
    texts = zip(np.asarray(found), lengths, strict=True)
    added = [row[start : start + num_tokens].tolist() for row, start in texts]
    return [model.tokenizer.decode(_before_end(x, config.end_tokens)) for x in added]


def _check(start: int, end: int, context: int, temperature: float, key: Any) -> None:
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


def _before_end(tokens: list[int], end_tokens: Sequence[int]) -> list[int]:
    ends = [tokens.index(end) for end in end_tokens if end in tokens]
    return tokens[: min(ends, default=len(tokens))]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _continue(
    apply: Callable[..., Any],
    config: Config,
    shared: int,
    params: Any,
    tokens: jax.Array,
    lengths: jax.Array,
    stop: int,
    temperature: float,
    key: jax.Array | None,
) -> jax.Array:
    """Fills in the tokens, (B, S), after the first `lengths` of each row, (B,).

    The first `shared` tokens, which every prompt has, pass through the model at once.
    """
    cache = Cache.empty(config, tokens.shape, jax.tree.leaves(params)[0].dtype)
    if shared:
        _, cache = apply(params, tokens[:, :shared], cache)
    ends = np.array(config.end_tokens, np.int32)

    def is_unfinished(state: tuple[Any, ...]) -> jax.Array:
        i, _, is_over, _ = state
        return (i + 1 < stop) & ~jnp.all(is_over)

    def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
        """Passes token i of each row through the model, and adds the next one."""
        i, tokens, is_over, cache = state
        last = jax.lax.dynamic_slice_in_dim(tokens, i, 1, axis=1)
        logits, cache = apply(params, last, cache)
        new = _choose(logits[:, 0], temperature, key, i)
        is_given = i + 1 < lengths
        new = jnp.where(is_given, tokens[:, i + 1], new)
        is_end = jnp.any(new[:, None] == ends, axis=1)
        is_over = is_over | (is_end & ~is_given)
        return i + 1, tokens.at[:, i + 1].set(new), is_over, cache

    state = jnp.int32(shared), tokens, jnp.zeros(len(lengths), bool), cache
    return jax.lax.while_loop(is_unfinished, step, state)[1]


def _choose(logits: jax.Array, temperature: Any, key: Any, i: jax.Array) -> jax.Array:
    """The next token of each row, (B,)."""
    if key is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    noise = jax.random.fold_in(key, i)
    return jax.random.categorical(noise, logits / temperature).astype(jnp.int32)
