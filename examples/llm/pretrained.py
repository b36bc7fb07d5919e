"""Loads a model with its tokenizer, and saves it."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from . import huggingface, tokenizer
from ._config import Config
from ._names import flat
from .bert import Bert
from .gguf_files import GGUFFile
from .gpt2 import GPT2
from .llama import Llama
from .packed import to_array
from .tokenizer import Tokenizer

MODELS = {"llama": Llama, "gpt2": GPT2, "bert": Bert}


class Pretrained(NamedTuple):
    """A model and its tokenizer.

    Attributes:
      config: the sizes and constants of the model.
      apply: computes logits: `apply(params, tokens)`. With a `Cache` of earlier tokens,
        it returns logits and the next cache: `apply(params, tokens, cache)`. Of a BERT,
        it computes vectors: `apply(params, tokens, is_token)`.
      params: the parameters, as a nested dict of arrays. Those of the layers have a
        leading axis of layers; kernels have the axes (in, out).
      tokenizer: the tokenizer.
    """

    config: Config
    apply: Callable[..., Any]
    params: dict[str, Any]
    tokenizer: Tokenizer


def load(
    path: str | pathlib.Path,
    *,
    dtype: Any = jnp.float32,
    remat: bool = False,
    packed: bool = False,
) -> Pretrained:
    """Loads a model from a folder in the layout of Hugging Face, or from a GGUF file.

    Args:
      path: the folder, or the file, whose name ends with ".gguf".
      dtype: of the parameters, and so of the products of matrices.
      remat: whether the backward pass computes the activations of layers again.
      packed: whether matrices stay quantised as they are in a GGUF file, for
        `lora.apply`, which unpacks them where they are used.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, the architecture or a setting is not implemented,
        or weights, configuration and tokenizer do not belong together.
    """
    path = pathlib.Path(path)
    if path.suffix == ".gguf":
        file = GGUFFile(path, packed=packed)
        config, tokens = file.config, tokenizer.from_gguf(file.settings)
        read_weights = file.read_weights
    elif packed:
        raise ValueError(
            f"packed needs a GGUF file, whose matrices are quantised; got {path}. "
            "Leave it out, or give a .gguf file."
        )
    else:
        config, tokens = huggingface.read_config(path), tokenizer.from_folder(path)
        read_weights = functools.partial(huggingface.read_weights, path, config)
    _check_vocabulary(config, tokens)
    graphdef, shapes = define(config, remat=remat)

    def convert(name: str, x: np.ndarray) -> Any:
        if x.dtype.fields is None:
            return jnp.asarray(x, dtype)
        return to_array(x, -2 if name.endswith("kernel") else -1, dtype)

    params = read_weights(shapes, convert)
    return Pretrained(config, apply_fn(graphdef), params, tokens)


def define(config: Config, *, remat: bool = False) -> tuple[Any, dict[str, Any]]:
    """The structure of a model for `nnx.merge`, and the shapes of its parameters."""
    make = MODELS[config.architecture]
    model = nnx.eval_shape(lambda: make(config, nnx.Rngs(0), remat=remat))
    graphdef, params = nnx.split(model, nnx.Param)
    return graphdef, nnx.to_pure_dict(params)


def apply_fn(graphdef: Any) -> Callable[..., Any]:
    """The model as a function of its parameters and its inputs."""
    return lambda params, *inputs: nnx.merge(graphdef, params)(*inputs)


def save(path: str | pathlib.Path, model: Pretrained) -> None:
    """Writes a folder that `load` and transformers load.

    Raises:
      ValueError: the parameters or the tokenizer do not belong to the configuration.
    """
    path = pathlib.Path(path)
    _check_vocabulary(model.config, model.tokenizer)
    _check_shapes(model)
    huggingface.write(path, model.config, model.params)
    model.tokenizer.save(path)


def _check_vocabulary(config: Config, tokens: Tokenizer) -> None:
    if tokens.vocabulary_size > config.vocabulary_size:
        raise ValueError(
            f"The tokenizer must have at most {config.vocabulary_size} tokens, as many "
            f"as the model; got {tokens.vocabulary_size}. Use the tokenizer that "
            "belongs to the model."
        )


def _check_shapes(model: Pretrained) -> None:
    _, shapes = define(model.config)
    required = {name: x.shape for name, x in flat(shapes).items()}
    given = {name: jnp.shape(x) for name, x in flat(model.params).items()}
    for name in required.keys() | given.keys():
        if required.get(name) != given.get(name):
            raise ValueError(
                f"The parameter {name} must have the shape {required.get(name)}, where "
                f"None stands for no parameter; got {given.get(name)}. Pass all "
                "parameters of the model, in the structure that load returns."
            )
