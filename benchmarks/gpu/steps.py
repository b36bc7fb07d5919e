"""What private gradients cost beside plain training, for models from GPT-2 to 1B.

Contenders map float32 masters and a batch to gradients, or to their clipped sum; the
cast to a compute dtype is a part of that, the optimizer and the noise are not. A line
is written when a contender has run, and one for the best of each kind, timed in turn,
whenever that changed.

    models     GPT-2 in bfloat16, sequences of 100: `jax.grad` of the mean loss;
               book-keeping in floats, whose sensitivity is not proved, and bounded;
               vmap with integer sums; jax_privacy where it is installed.
               Llamas: SmolLM2-135M at 512 tokens, and a billion parameters at 1024
               tokens, with activations that are computed again. Gradients are those of
               all parameters ("full"), or of adapters of rank 8 in all matrices
               ("LoRA") beside frozen bfloat16 ones
    float8     a wide GPT-2, next to bfloat16

The models are those of `examples/llm`, whose layers are a loop, with random weights.
"share_of_peak" is the rate at which the operations of a model are done, over that of a
large product of bfloat16 matrices.

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
import optax

import dpmp
from benchmarks import harness
from benchmarks.gpu import programs
from benchmarks.gpu.programs import Session
from benchmarks.models import GPT2, TINY, Task, language_model
from dpmp import lora
from dpmp.numerics import ExactSums

Make = Callable[..., Callable[..., Any]]  # from a loss to a function for gradients

_CLIP = functools.partial(dpmp.clipped_grad, l2_clip_norm=1.0)


def _jax_privacy(loss_fn: Any, **options: Any) -> Callable[..., Any]:
    from jax_privacy import clipping

    return clipping.clipped_grad(loss_fn, l2_clip_norm=1.0, **options)


_FLOATS, _BOUNDED = "book-keeping, float32", "book-keeping, bounded"
_EXACT, _FINE = "per example, exact", "per example, finer"
_KINDS: dict[str, Make] = {
    "plain": lambda loss_fn, **_: jax.grad(loss_fn),
    _FLOATS: functools.partial(
        _CLIP, method="book_keeping", arithmetic="unproved_float32"
    ),
    _BOUNDED: functools.partial(_CLIP, method="book_keeping", arithmetic="bounded"),
    _EXACT: functools.partial(_CLIP, arithmetic="exact"),
    # The default resolution is too coarse for the largest model.
    _FINE: functools.partial(_CLIP, arithmetic=ExactSums(2**17)),
    "jax_privacy": _jax_privacy,
}
# These go a round later: their programs are those that take long to compile.
_SLOW = (_EXACT, _FINE, "jax_privacy")


_in_bfloat16 = functools.partial(optax.tree.cast, dtype=jnp.bfloat16)

# Microbatch sizes of each kind, the most promising first; None is the whole batch.
Sizes = Mapping[str, tuple[int | None, ...]]


class Subject(NamedTuple):
    """A model, and what it is run with."""

    model: Callable[..., Task]
    batch_size: int
    length: int  # of a sequence
    contenders: Mapping[str, Sizes]  # for gradients of all parameters, or of adapters
    speed_of_fastdp: float | None = None  # over that of plain training, as published


def _gpt2(
    sizes: tuple[int, int, int],
    batch_size: int,
    in_floats: tuple[int | None, ...],
    bounded: tuple[int, ...],
    per_example: tuple[int, ...],
    speed_of_fastdp: float,
    exact: str = _EXACT,
) -> Subject:
    kinds = {_FLOATS: in_floats, _BOUNDED: bounded, exact: per_example}
    contenders = {"full": {**kinds, "jax_privacy": per_example}}
    model = _sized(GPT2, "width num_layers num_heads", sizes)
    return Subject(model, batch_size, 100, contenders, speed_of_fastdp)


def _llama(
    sizes: tuple[int, ...], batch_size: int, length: int, **microbatches: Any
) -> Subject:
    names = "vocabulary_size width num_layers num_heads num_key_value_heads"
    make = functools.partial(language_model, "llama", remat=True)
    model = _sized(make, f"{names} hidden_width context", sizes)
    contenders = {k: {_BOUNDED: x, _FLOATS: x} for k, x in microbatches.items()}
    return Subject(model, batch_size, length, contenders)


def _sized(model: Any, names: str, sizes: tuple[int, ...]) -> Callable[..., Task]:
    return functools.partial(model, **dict(zip(names.split(), sizes, strict=True)))


_SPEED_OF_FLASHDP = 0.90
_SMALL, _MEDIUM, _LARGE = (768, 12, 12), (1024, 24, 16), (1280, 36, 20)
_SMOLLM2 = (49152, 576, 30, 9, 3, 1536, 2048)
_DECODER = (32768, 2048, 18, 16, 16, 5632, 1024)
SUBJECTS = {
    "small": _gpt2(_SMALL, 100, (None, 50, 10, 4), (100, 50, 10), (10, 20, 4), 0.80),
    "medium": _gpt2(_MEDIUM, 50, (None, 25, 10, 5), (50, 25, 10), (5, 10, 2), 0.80),
    "large": _gpt2(_LARGE, 20, (None, 10, 5), (20, 10, 5), (4, 5, 2), 0.87, _FINE),
    "smollm2": _llama(_SMOLLM2, 32, 512, LoRA=(32, 8), full=(8, 4)),
    "decoder": _llama(_DECODER, 8, 1024, LoRA=(8, 4), full=(2, 4)),
}
_RANK, _TARGETS = 8, "layers/.*kernel"
# For each parameter and token; nothing for attention, norms and activations that are
# computed again (Kaplan et al., 2020, https://arxiv.org/abs/2001.08361, section 2.1).
_OPERATIONS = {"LoRA": 4, "full": 6}


def _tiny(subject: Subject) -> Subject:
    """The same with few parameters, and one microbatch size of each kind but one."""
    sizes = {_FLOATS: (None, 2)}
    contenders = {
        trained: {kind: sizes.get(kind, (2,)) for kind in kinds}
        for trained, kinds in subject.contenders.items()
    }
    model = functools.partial(subject.model, **TINY)
    return subject._replace(model=model, batch_size=4, length=8, contenders=contenders)


def _makers(contenders: Sizes) -> dict[str, Make]:
    """By kind and microbatch size: the most promising of each kind, then the next."""
    places = [
        (
            i + (kind in _SLOW),
            f"{kind}, {size or 'all'}",
            functools.partial(_KINDS[kind], microbatch_size=size),
        )
        for kind, sizes in {"plain": (None,), **contenders}.items()
        for i, size in enumerate(sizes)
        if kind != "jax_privacy" or harness.is_installed(kind)
    ]
    return {name: make for _, name, make in sorted(places, key=lambda x: x[0])}


def run_models(session: Session) -> None:
    """Measures all contenders for the model of this part."""
    subject = SUBJECTS[session.part]
    subject = _tiny(subject) if session.is_tiny else subject
    batch_size, length = subject.batch_size, subject.length
    task, rate = subject.model(batch_size, length), _rate_of_products(session)
    num_parameters = sum(x.size for x in jax.tree.leaves(task.params))

    def full(make: Make, params: Any, batch: Any) -> Any:
        return make(task.loss_fn)(_in_bfloat16(params), batch)

    def adapted(make: Make, params: Any, batch: Any) -> Any:
        frozen, adapters = params
        return make(lora.apply(task.loss_fn, frozen))(_in_bfloat16(adapters), batch)

    def more(trained: str, milliseconds: dict[str, float]) -> dict[str, Any]:
        plain = milliseconds.get("plain, all", 0.0)
        operations = _OPERATIONS[trained] * num_parameters * batch_size * length
        return {
            "model": session.part,
            "trained": trained,
            "batch_size": batch_size,
            "length": length,
            "speed_of_plain": {k: round(plain / x, 3) for k, x in milliseconds.items()},
            "published_speed_of_plain": {
                "fastDP": subject.speed_of_fastdp,
                "FlashDP": subject.speed_of_fastdp and _SPEED_OF_FLASHDP,
            },
            "share_of_peak": {
                name: round(operations / (1e-3 * x) / rate, 3)
                for name, x in milliseconds.items()
            },
            "products_teraflops_per_second": round(rate / 1e12, 1),
        }

    for trained, contenders in subject.contenders.items():
        step, params = full, task.params
        if trained == "LoRA":
            frozen = _in_bfloat16(task.params)
            params = frozen, lora.init(jax.random.key(0), frozen, _RANK, _TARGETS)
            step = adapted
        programs.compare(
            session,
            {k: functools.partial(step, x) for k, x in _makers(contenders).items()},
            (params, task.batch),
            reference="plain, all",
            kind=lambda name: name.rpartition(", ")[0],
            rounds=20,
            more=functools.partial(more, trained),
        )


def _rate_of_products(session: Session) -> float:
    """Operations in a second, of a large product of bfloat16 matrices."""
    size = 64 if session.is_tiny else 8192
    x = jnp.ones((size, size), jnp.bfloat16)
    call = functools.partial(jax.jit(jnp.matmul), x, x)
    jax.block_until_ready(call())
    return 2 * size**3 / programs.fastest_seconds(call)


_WIDE: dict[str, Any] = {"vocabulary_size": 8192, "width": 2048}
_WIDE |= {"num_layers": 4, "num_heads": 16}
_POLICIES = {
    "bfloat16": dpmp.Policy.from_name("mixed_bfloat16"),
    "float8": dpmp.Policy.from_name("float8"),
}
_ENGINES = {
    "plain": _KINDS["plain"],
    _FLOATS: _KINDS[_FLOATS],
    _EXACT: functools.partial(_KINDS[_EXACT], microbatch_size=4),
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
        more=lambda _: {"shape": sizes, "tokens": shape},
    )
