"""LoRA: fine-tunes a frozen model by training low-rank changes of its arrays.

`apply` turns a function of parameters into a function of adapters, by rewriting its
program. The model needs no change, and may come from any library.

>>> def loss_fn(params, example):
...     return jnp.mean((example["x"] @ params["kernel"] - example["y"]) ** 2)
>>> params = {"kernel": jnp.ones((8, 4), jnp.bfloat16)}
>>> adapters = init(jax.random.key(0), params, rank=2, targets="kernel")
>>> adapted_loss_fn = apply(loss_fn, params)  # for DPTrainer or clipped_grad
>>> model = merge(params, adapters)

`partition` and `combine` freeze some arrays of a model, and train the others.

References:
  Hu et al., 2021: LoRA: low-rank adaptation of large language models,
  https://arxiv.org/abs/2106.09685.
"""

from dpmp.lora._adapters import Adapters, Axes, Factors, check_trained
from dpmp.lora._apply import apply, init, merge
from dpmp.lora._files import load, save
from dpmp.lora._names import combine, partition

__all__ = [
    "Adapters",
    "Axes",
    "Factors",
    "apply",
    "check_trained",
    "combine",
    "init",
    "load",
    "merge",
    "partition",
    "save",
]
