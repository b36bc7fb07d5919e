"""What private gradients cost beside plain training, for models from GPT-2 to 1B.

Contenders map float32 masters and a batch to gradients, or to their clipped sum; the
cast to a compute dtype is a part of that, the optimizer and the noise are not. A line
is written when a contender has run, and one for the best of each kind, timed in turn,
whenever that changed.

    gpt2       GPT-2 in bfloat16, sequences of 100: `jax.grad` of the mean loss;
               book-keeping in floats, whose sensitivity is not proved, and bounded;
               vmap with integer sums; jax_privacy where it is installed
    decoder    Llamas: SmolLM2-135M at 512 tokens, and a billion parameters at 1024
               tokens. Layers compute their activations again. Gradients are those of
               all parameters ("full"), or of adapters of rank 8 in all matrices
               ("LoRA") beside frozen bfloat16 ones.
    float8     a wide GPT-2, next to bfloat16

The models are those of `examples/llm`, whose layers are a loop, with random weights.

References for GPT-2, for fine-tuning of the same models:
  Bu et al.: Differentially private optimization on large model at small cost, 2022:
  0.80, 0.80 and 0.87 of the speed of plain training (GPT-2 small, medium and large).
  FlashDP, 2025: 0.90.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import dpmp
from benchmarks import harness
from benchmarks.gpu import programs
from benchmarks.gpu.programs import Session
from benchmarks.models import GPT2, TINY, Task, language_model
from dpmp import lora
from dpmp.numerics import ExactSums

Make = Callable[..., Callable[..., Any]]  # from a loss to a function for gradients

_CLIP = functools.partial(dpmp.clipped_grad, l2_clip_norm=1.0)
_FLOATS: Make = functools.partial(
    _CLIP, method="book_keeping", arithmetic="unproved_float32"
)
_BOUNDED: Make = functools.partial(_CLIP, method="book_keeping", arithmetic="bounded")
_EXACT: Make = functools.partial(_CLIP, method="per_example", arithmetic="exact")


def _in_bfloat16(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


# ------------------------------------------------------------------------------ GPT-2


class Setting(NamedTuple):
    """A GPT-2, and the microbatch sizes of each kind, the most promising first."""

    sizes: Mapping[str, int]  # of the model
    batch_size: int
    in_floats: tuple[int | None, ...]  # None is the whole batch
    bounded: tuple[int, ...]
    per_example: tuple[int, ...]
    speed_of_fastdp: float | None = None  # over that of plain training, as published
    exact: Make = _EXACT
    length: int = 100


_SPEED_OF_FLASHDP = 0.90
_SMALL = {"width": 768, "num_layers": 12, "num_heads": 12}
_MEDIUM = {"width": 1024, "num_layers": 24, "num_heads": 16}
_LARGE = {"width": 1280, "num_layers": 36, "num_heads": 20}
# The default resolution is too coarse for the largest model.
_FINE = functools.partial(_EXACT, arithmetic=ExactSums(2**17))
GPT2S = {
    "small": Setting(_SMALL, 100, (None, 50, 10, 4), (100, 50, 10), (10, 20, 4), 0.80),
    "medium": Setting(_MEDIUM, 50, (None, 25, 10, 5), (50, 25, 10), (5, 10, 2), 0.80),
    "large": Setting(_LARGE, 20, (None, 10, 5), (20, 10, 5), (4, 5, 2), 0.87, _FINE),
}
_TINY_SETTING = Setting(TINY, 4, (None, 2), (2,), (2,), length=8)


def _makers(setting: Setting) -> dict[str, Make]:
    """By kind and microbatch size: the most promising of each kind, then the next."""
    kinds: list[tuple[str, Make, tuple[int | None, ...], int]] = [
        ("plain", lambda loss_fn, **_: jax.grad(loss_fn), (None,), 0),
        ("book-keeping, float32", _FLOATS, setting.in_floats, 0),
        ("book-keeping, bounded", _BOUNDED, setting.bounded, 0),
        # These go a round later: their programs are those that take long to compile.
        ("per example, exact", setting.exact, setting.per_example, 1),
    ]
    if harness.is_installed("jax_privacy"):
        from jax_privacy import clipping

        theirs = functools.partial(clipping.clipped_grad, l2_clip_norm=1.0)
        kinds.append(("jax_privacy", theirs, setting.per_example, 1))
    places = [
        (
            i + delay,
            f"{kind}, {size or 'all'}",
            functools.partial(make, microbatch_size=size),
        )
        for kind, make, sizes, delay in kinds
        for i, size in enumerate(sizes)
    ]
    return {name: make for _, name, make in sorted(places, key=lambda x: x[0])}


def run_gpt2(session: Session) -> None:
    """Measures all contenders for the model of this part."""
    model = session.part
    setting = _TINY_SETTING if session.is_tiny else GPT2S[model]
    batch_size, length = setting.batch_size, setting.length
    task = GPT2(batch_size, length, **setting.sizes)

    def step(make: Make, params: Any, batch: Any) -> Any:
        return make(task.loss_fn)(_in_bfloat16(params), batch)

    def more(milliseconds: dict[str, float]) -> dict[str, Any]:
        plain = milliseconds.get("plain, all", 0.0)
        published = {"fastDP": setting.speed_of_fastdp, "FlashDP": _SPEED_OF_FLASHDP}
        return {
            "model": model,
            "batch_size": batch_size,
            "length": length,
            "speed_of_plain": {k: round(plain / x, 3) for k, x in milliseconds.items()},
            "published_speed_of_plain": published,
        }

    programs.compare(
        session,
        {k: functools.partial(step, make) for k, make in _makers(setting).items()},
        task.args,
        reference="plain, all",
        kind=lambda name: name.rpartition(", ")[0],
        rounds=20,
        has_early_lines=True,
        more=more,
    )


# --------------------------------------------------------------------------- decoders


class Subject(NamedTuple):
    """A decoder, and what it is run with."""

    sizes: Mapping[str, int]  # of the model
    batch_size: int
    length: int  # of a sequence
    microbatch_sizes: dict[str, tuple[int, ...]]  # the most promising first


_SMOLLM2 = {
    "vocabulary_size": 49152,
    "width": 576,
    "num_layers": 30,
    "num_heads": 9,
    "num_key_value_heads": 3,
    "hidden_width": 1536,
    "context": 2048,
}
_DECODER = {
    "vocabulary_size": 32768,
    "width": 2048,
    "num_layers": 18,
    "num_heads": 16,
    "hidden_width": 5632,
    "context": 1024,
}
DECODERS = {
    "smollm2": Subject(_SMOLLM2, 32, 512, {"LoRA": (32, 8), "full": (8, 4)}),
    "decoder": Subject(_DECODER, 8, 1024, {"LoRA": (8, 4), "full": (2, 4)}),
}
_TINY_LLAMA = TINY | {"num_key_value_heads": 1, "hidden_width": 24}
_TINY_SUBJECT = Subject(_TINY_LLAMA, 4, 8, {"LoRA": (4,), "full": (2,)})
_RANK, _TARGETS = 8, "layers/.*kernel"
# For each parameter and token; nothing for attention, norms and activations that are
# computed again (Kaplan et al., 2020, https://arxiv.org/abs/2001.08361, section 2.1).
_OPERATIONS = {"LoRA": 4, "full": 6}


def run_decoder(session: Session) -> None:
    """Measures all contenders for the model of this part.

    "share_of_peak" is the rate at which the operations of the model are done, over that
    of a large product of bfloat16 matrices.
    """
    model = session.part
    subject = _TINY_SUBJECT if session.is_tiny else DECODERS[model]
    batch_size, length = subject.batch_size, subject.length
    task = language_model("llama", batch_size, length, remat=True, **subject.sizes)
    num_parameters = sum(x.size for x in jax.tree.leaves(task.params))
    frozen = _in_bfloat16(task.params)
    adapters = lora.init(jax.random.key(0), frozen, _RANK, _TARGETS)
    rate = _rate_of_products(session)

    def more(trained: str, milliseconds: dict[str, float]) -> dict[str, Any]:
        operations = _OPERATIONS[trained] * num_parameters * batch_size * length
        return {
            "model": model,
            "trained": trained,
            "batch_size": batch_size,
            "length": length,
            "share_of_peak": {
                name: round(operations / (1e-3 * x) / rate, 3)
                for name, x in milliseconds.items()
            },
            "products_teraflops_per_second": round(rate / 1e12, 1),
        }

    for trained in _OPERATIONS:
        programs.compare(
            session,
            _steps_of_decoder(task, trained, subject.microbatch_sizes[trained]),
            (task.params, frozen, adapters, task.batch),
            reference=f"{trained}, plain",
            more=functools.partial(more, trained),
        )


def _steps_of_decoder(
    task: Task, trained: str, sizes: tuple[int, ...]
) -> dict[str, Any]:
    """The functions of all contenders, the most important first."""

    def step(make: Make, params: Any, frozen: Any, adapters: Any, batch: Any) -> Any:
        if trained == "full":
            return make(task.loss_fn)(_in_bfloat16(params), batch)
        return make(lora.apply(task.loss_fn, frozen))(_in_bfloat16(adapters), batch)

    makers: dict[str, Make] = {"plain": jax.grad}
    for size in sizes:
        for name, make in {"bounded": _BOUNDED, "float32": _FLOATS}.items():
            in_size = functools.partial(make, microbatch_size=size)
            makers[f"book-keeping, {name}, {size}"] = in_size
    return {f"{trained}, {k}": functools.partial(step, x) for k, x in makers.items()}


def _rate_of_products(session: Session) -> float:
    """Operations in a second, of a large product of bfloat16 matrices."""
    size = 64 if session.is_tiny else 8192
    x = jnp.ones((size, size), jnp.bfloat16)
    call = functools.partial(jax.jit(jnp.matmul), x, x)
    jax.block_until_ready(call())
    return 2 * size**3 / programs.fastest_seconds(call)


# ----------------------------------------------------------------------------- float8

_WIDE = {
    "vocabulary_size": 8192,
    "width": 2048,
    "num_layers": 4,
    "num_heads": 16,
    "context": 512,
}
_POLICIES = {
    "bfloat16": dpmp.Policy.from_name("mixed_bfloat16"),
    "float8": dpmp.Policy.from_name("float8"),
}
_ENGINES: dict[str, Make] = {
    "plain": jax.grad,
    "book-keeping, float32": _FLOATS,
    "per example, exact": functools.partial(_EXACT, microbatch_size=4),
}


def run_float8(session: Session) -> None:
    """Steps; the products are in the part "products"."""
    sizes, shape = (TINY, (4, 8)) if session.is_tiny else (_WIDE, (32, 256))
    task = GPT2(*shape, **sizes)

    def step(policy: dpmp.Policy, make: Make, params: Any, batch: Any) -> Any:
        grad_fn = make(policy.in_product_precision(task.loss_fn))
        return grad_fn(policy.cast_to_compute(params), batch)

    steps = {
        f"{engine}, {dtype}": functools.partial(step, policy, make)
        for engine, make in _ENGINES.items()
        for dtype, policy in _POLICIES.items()
    }
    programs.compare(
        session,
        steps,
        task.args,
        reference="plain, bfloat16",
        has_early_lines=True,
        more=lambda _: {"shape": sizes, "tokens": shape},
    )
