"""Ways to train a decoder that need less and less memory, and the memory of each."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpmp import lora
from dpmp.clipping import clipped_grad
from dpmp.numerics import num_entries
from dpmp.planning._decoder import ADAPTED, Decoder
from dpmp.planning.memory import MemoryEstimate, MemoryLine, estimate_memory
from dpmp.precision import Policy

# The number of examples with which activations are compiled.
LARGEST_MICROBATCH = 64

_MASTERS = 'dpmp.Policy("bfloat16", "bfloat16", stochastic_rounding=True)'
_MIXED = '"mixed_bfloat16"'


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to train a decoder."""

    name: str  # in tables
    policy: str  # as it is written in a program
    # The bits of a frozen entry, with the scales of its quantisation; None if all
    # parameters are trained.
    base_bits: float | None = None

    @property
    def is_lora(self) -> bool:
        """Whether adapters are trained."""
        return self.base_bits is not None


METHODS = (
    Method("all parameters, float32 masters", _MIXED),
    Method("all parameters, bfloat16 masters", _MASTERS),
    Method("LoRA, bfloat16 base", _MIXED, 16),
    Method("LoRA, int8 base", _MIXED, 8),
    Method("LoRA, 4-bit base", _MIXED, 4.5),  # bfloat16 scales of 32 entries
)


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder, what LoRA would train of it, and the shapes of its examples."""

    decoder: Decoder
    length: int  # the number of tokens in an example
    rank: int  # of adapters
    num_in_adapters: int  # the number of their entries
    remat: bool = False  # whether layers are computed again in the backward pass

    def num_trained(self, method: Method) -> int:
        """The number of entries that are trained, and receive noise."""
        return self.num_in_adapters if method.is_lora else self.decoder.num_parameters

    def memory(
        self, method: Method, batch_size: int, microbatch_size: int = 0
    ) -> MemoryEstimate:
        """The memory of a step; without activations for a microbatch of 0 examples."""
        adapters = jax.ShapeDtypeStruct((self.num_in_adapters,), jnp.float32)
        estimate = estimate_memory(
            adapters if method.is_lora else self.decoder.shapes(jnp.float32),
            jax.ShapeDtypeStruct((batch_size, self.length), jnp.int32),
            policy=_policy(method),
            optimizer=optax.adam(1e-3),
            method="book_keeping",
        )
        lines = list(estimate.lines)
        if method.base_bits is not None:
            lines = [*_of_frozen(self.decoder, method.base_bits), *lines]
        if microbatch_size:
            lines += self._activations(method, microbatch_size)
        return dataclasses.replace(estimate, lines=tuple(lines))

    def fitting(
        self, method: Method, batch_size: int, num_bytes: float
    ) -> tuple[int, MemoryEstimate]:
        """The largest power of two that fits as a microbatch, 0 if none, and memory."""
        memory, size = self.memory(method, batch_size), LARGEST_MICROBATCH
        if memory.total > num_bytes:
            return 0, memory
        while size:
            memory = self.memory(method, batch_size, size)
            if size <= batch_size and memory.total <= num_bytes:
                return size, memory
            size //= 2
        return 0, memory

    def _activations(self, method: Method, size: int) -> list[MemoryLine]:
        rank = self.rank if method.is_lora else None
        copies, each = activation_bytes(self.decoder, self.length, rank, self.remat)
        text = f"{size} x {each / 1e9:.3g} GB, extrapolated"
        lines = [MemoryLine("activations", round(size * each), "clipping", text)]
        if rank:
            text = "for example of embeddings"
            lines.append(MemoryLine("copies", round(copies), "clipping", text))
        return lines


def _policy(method: Method) -> Policy:
    if method.policy == _MASTERS:
        return Policy(jnp.bfloat16, jnp.bfloat16, stochastic_rounding=True)
    return Policy.from_name("mixed_bfloat16")


def _of_frozen(decoder: Decoder, bits: float) -> list[MemoryLine]:
    """The frozen arrays, and copies of the largest part that is used at once."""
    layer = num_entries(decoder.shapes(jnp.float32)["layers"]) // decoder.layers
    part = max(layer, decoder.vocabulary * decoder.width)
    copies = 2 if bits < 8 else 1  # unpacked, and then scaled
    base, text = round(bits / 8 * decoder.num_parameters), "a layer or the embedding"
    text = f"{copies} x {text}, in bfloat16"
    return [
        MemoryLine("frozen base", base, "throughout", f"{bits:g} bits an entry"),
        MemoryLine("part in use", 2 * copies * part, "clipping", text),
    ]


@functools.cache
def activation_bytes(
    decoder: Decoder, length: int, rank: int | None, remat: bool
) -> tuple[float, float]:
    """Temporary bytes of a sum of clipped gradients: fixed ones, then per example."""
    temporaries = functools.partial(_temporaries, decoder, length, rank, remat)
    many = temporaries(LARGEST_MICROBATCH)
    if rank is None:  # the fixed ones are sums, which `estimate_memory` counts
        return 0.0, many / LARGEST_MICROBATCH
    one = temporaries(1)
    each = (many - one) / (LARGEST_MICROBATCH - 1)
    return one - each, each


def _temporaries(
    decoder: Decoder, length: int, rank: int | None, remat: bool, size: int
) -> int:
    """The temporary bytes of a compiled sum of clipped gradients of `size` examples."""
    loss_fn = functools.partial(decoder.loss_fn, remat=remat)
    # float16 stands for bfloat16, which the CPU's compiler would replace by float32.
    params = decoder.shapes(jnp.float16)
    tokens = jax.ShapeDtypeStruct((size, length), jnp.int32)

    def adapters(params: Any, tokens: Any) -> lora.Adapters:
        args = {"fun": loss_fn, "example_args": (tokens,)}
        return lora.init(jax.random.key(0), params, rank or 1, ADAPTED, **args)

    def summed(trained: Any, params: Any, tokens: Any) -> Any:
        return clipped_grad(
            lora.apply(loss_fn, params) if rank else loss_fn,
            l2_clip_norm=1.0,
            method="book_keeping",
            microbatch_size=size,
        )(trained, tokens)

    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        trained = jax.eval_shape(adapters, params, tokens) if rank else params
        lowered = jax.jit(summed).lower(trained, params if rank else (), tokens)
        # Code that is never run need not be optimised. Its buffers are the same.
        options: Any = {"xla_backend_optimization_level": 0}
        compiled = lowered.compile(options)
    memory: Any = compiled.memory_analysis()
    return memory.temp_size_in_bytes
