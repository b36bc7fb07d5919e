"""What private gradients cost beside plain training, for models from GPT-2 to 1B.

Contenders map float32 masters and a batch to gradients, or to their clipped sum; the
cast to a compute dtype is a part of that, the optimizer and the noise are not. A line
is written when a contender has run, and one for the best of each kind, timed in turn,
whenever that changed.

    gpt2       GPT-2 in bfloat16, sequences of 100: `jax.grad` of the mean loss;
               book-keeping in floats, whose sensitivity is not proved, and bounded;
               vmap with integer sums; jax_privacy where it is installed
    decoder    Llamas of `examples/llm` with random weights: SmolLM2-135M at 512 tokens,
               and a billion parameters at 1024 tokens. Layers are a loop that computes
               activations again. Gradients are those of all parameters ("full"), or of
               adapters of rank 8 in all matrices ("LoRA") beside frozen bfloat16 ones.
    float8     a wide GPT-2, next to bfloat16

References for GPT-2, for fine-tuning of the same models:
  Bu et al.: Differentially private optimization on large model at small cost, 2022:
  0.80, 0.80 and 0.87 of the speed of plain training (GPT-2 small, medium and large).
  FlashDP, 2025: 0.90.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import dpmp
from benchmarks import harness
from benchmarks.gpu import programs
from benchmarks.gpu.programs import Session
from benchmarks.models import GPT2, TINY_GPT2
from dpmp import lora
from dpmp.numerics import ExactSums
from examples import llm
from examples.llm import pretrained
from examples.llm._config import Config

_FLOATS = {"method": "book_keeping", "arithmetic": "unproved_float32"}
_BOUNDED = {"method": "book_keeping", "arithmetic": "bounded"}
_EXACT = {"method": "per_example", "arithmetic": "exact"}
_CLIP = functools.partial(dpmp.clipped_grad, l2_clip_norm=1.0)


def _in_bfloat16(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


# ------------------------------------------------------------------------------ GPT-2


class Setting(NamedTuple):
    """A GPT-2, and the microbatch sizes of each kind, the most promising first."""

    shape: GPT2
    batch_size: int
    in_floats: tuple[int | None, ...]  # None is the whole batch
    bounded: tuple[int, ...]
    per_example: tuple[int, ...]
    speed_of_fastdp: float | None = None  # over that of plain training, as published
    resolution: int | None = None  # the default is too coarse for the largest model
    length: int = 100


_SPEED_OF_FLASHDP = 0.90
_SMALL, _MEDIUM, _LARGE = GPT2(12, 768, 12), GPT2(24, 1024, 16), GPT2(36, 1280, 20)
GPT2S = {
    "small": Setting(_SMALL, 100, (None, 50, 10, 4), (100, 50, 10), (10, 20, 4), 0.80),
    "medium": Setting(_MEDIUM, 50, (None, 25, 10, 5), (50, 25, 10), (5, 10, 2), 0.80),
    "large": Setting(_LARGE, 20, (None, 10, 5), (20, 10, 5), (4, 5, 2), 0.87, 2**17),
}
_TINY_SETTING = Setting(TINY_GPT2, 4, (None, 2), (2,), (2,), length=8)


def _grad_fns(setting: Setting, loss_fn: Any) -> dict[str, Callable[..., Any]]:
    """By kind and microbatch size: the most promising of each kind, then the next."""
    clip = functools.partial(_CLIP, loss_fn)
    exact: Any = dict(_EXACT)
    if setting.resolution:
        exact["arithmetic"] = ExactSums(setting.resolution)
    in_floats = functools.partial(clip, **_FLOATS)
    bounded = functools.partial(clip, **_BOUNDED)
    per_example = functools.partial(clip, **exact)
    kinds: list[tuple[str, Any, tuple[int | None, ...], int]] = [
        ("plain", lambda **_: jax.grad(loss_fn), (None,), 0),
        ("book-keeping, float32", in_floats, setting.in_floats, 0),
        ("book-keeping, bounded", bounded, setting.bounded, 0),
        # These go a round later: their programs are those that take long to compile.
        ("per example, exact", per_example, setting.per_example, 1),
    ]
    if harness.is_installed("jax_privacy"):
        from jax_privacy import clipping

        theirs = functools.partial(clipping.clipped_grad, loss_fn, l2_clip_norm=1.0)
        kinds.append(("jax_privacy", theirs, setting.per_example, 1))
    places = [
        (i + delay, f"{kind}, {size or 'all'}", make(microbatch_size=size))
        for kind, make, sizes, delay in kinds
        for i, size in enumerate(sizes)
    ]
    return {name: grad_fn for _, name, grad_fn in sorted(places, key=lambda x: x[0])}


def run_gpt2(session: Session) -> None:
    """Measures all contenders for the model of this part."""
    model = session.part
    setting = _TINY_SETTING if session.is_tiny else GPT2S[model]
    shape = setting.shape

    def make_args() -> tuple[Any, jax.Array]:
        keys = jax.random.split(jax.random.key(0))
        size = (setting.batch_size, setting.length)
        tokens = jax.random.randint(keys[0], size, 0, shape.vocabulary)
        return shape.init(keys[1]), tokens

    def step(grad_fn: Any, params: Any, tokens: jax.Array) -> Any:
        return grad_fn(_in_bfloat16(params), tokens)

    grad_fns = _grad_fns(setting, shape.loss_fn())
    steps = {k: functools.partial(step, grad_fn) for k, grad_fn in grad_fns.items()}

    def more(milliseconds: dict[str, float]) -> dict[str, Any]:
        plain = milliseconds.get("plain, all", 0.0)
        published = {"fastDP": setting.speed_of_fastdp, "FlashDP": _SPEED_OF_FLASHDP}
        return {
            "model": model,
            "batch_size": setting.batch_size,
            "length": setting.length,
            "speed_of_plain": {k: round(plain / x, 3) for k, x in milliseconds.items()},
            "published_speed_of_plain": published,
        }

    programs.compare(
        session,
        steps,
        make_args,
        reference="plain, all",
        kind=lambda name: name.rpartition(", ")[0],
        rounds=20,
        has_early_lines=True,
        more=more,
    )


# --------------------------------------------------------------------------- decoders


class Subject(NamedTuple):
    """A decoder, and what it is run with."""

    config: Config
    batch_size: int
    length: int  # of a sequence
    microbatch_sizes: dict[str, tuple[int, ...]]  # the most promising first


def _llama(*sizes: int) -> Config:
    names = ("vocabulary_size", "width", "num_layers", "num_heads")
    names += ("num_key_value_heads", "head_width", "hidden_width", "context")
    options: Any = dict(zip(names, sizes, strict=True))
    return Config(architecture="llama", norm_epsilon=1e-5, **options)


_SMOLLM2 = _llama(49152, 576, 30, 9, 3, 64, 1536, 2048)
_DECODER = _llama(32768, 2048, 18, 16, 16, 128, 5632, 1024)
DECODERS = {
    "smollm2": Subject(_SMOLLM2, 32, 512, {"LoRA": (32, 8), "full": (8, 4)}),
    "decoder": Subject(_DECODER, 8, 1024, {"LoRA": (8, 4), "full": (2, 4)}),
}
_TINY_LLAMA = _llama(40, 16, 2, 2, 1, 8, 24, 16)
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
    make_args = functools.partial(_random_arguments, subject)
    _, shapes = pretrained.define(subject.config)
    num_parameters = sum(x.size for x in jax.tree.leaves(shapes))
    rate = _rate_of_products(session)

    def more(trained: str, milliseconds: dict[str, float]) -> dict[str, Any]:
        tokens = subject.batch_size * subject.length
        operations = _OPERATIONS[trained] * num_parameters * tokens
        return {
            "model": model,
            "trained": trained,
            "batch_size": subject.batch_size,
            "length": subject.length,
            "share_of_peak": {
                name: round(operations / (1e-3 * x) / rate, 3)
                for name, x in milliseconds.items()
            },
            "products_teraflops_per_second": round(rate / 1e12, 1),
        }

    for trained in _OPERATIONS:
        programs.compare(
            session,
            _steps_of_decoder(subject, trained),
            make_args,
            reference=f"{trained}, plain",
            more=functools.partial(more, trained),
        )


def _random_arguments(subject: Subject) -> tuple[Any, ...]:
    """Float32 parameters, frozen bfloat16 ones, adapters and a batch."""
    keys = jax.random.split(jax.random.key(0), 3)
    _, shapes = pretrained.define(subject.config)
    leaves, tree = jax.tree.flatten(shapes)

    def draw(number: int, shape: tuple[int, ...]) -> jax.Array:
        if len(shape) < 2:  # the scale of a normalisation
            return jnp.ones(shape)
        return 0.02 * jax.random.normal(jax.random.fold_in(keys[0], number), shape)

    params = jax.tree.unflatten(tree, [draw(i, x.shape) for i, x in enumerate(leaves)])
    frozen = _in_bfloat16(params)
    adapters = lora.init(keys[1], frozen, _RANK, _TARGETS)
    size = (subject.batch_size, subject.length)
    tokens = jax.random.randint(keys[2], size, 0, subject.config.vocabulary_size)
    is_target = jnp.broadcast_to(jnp.arange(subject.length) > 0, size)
    return params, frozen, adapters, {"tokens": tokens, "is_target": is_target}


def _steps_of_decoder(subject: Subject, trained: str) -> dict[str, Any]:
    """The functions of all contenders, the most important first."""
    graphdef, _ = pretrained.define(subject.config, remat=True)
    loss_fn = functools.partial(llm.mean_nats, pretrained.apply_fn(graphdef))

    def step(make: Any, params: Any, frozen: Any, adapters: Any, batch: Any) -> Any:
        if trained == "full":
            return make(loss_fn)(_in_bfloat16(params), batch)
        return make(lora.apply(loss_fn, frozen))(_in_bfloat16(adapters), batch)

    makers: dict[str, Callable[..., Any]] = {"plain": jax.grad}
    for size in subject.microbatch_sizes[trained]:
        for name, options in {"bounded": _BOUNDED, "float32": _FLOATS}.items():
            make = functools.partial(_CLIP, microbatch_size=size, **options)
            makers[f"book-keeping, {name}, {size}"] = make
    return {f"{trained}, {k}": functools.partial(step, x) for k, x in makers.items()}


def _rate_of_products(session: Session) -> float:
    """Operations in a second, of a large product of bfloat16 matrices."""
    size = 64 if session.is_tiny else 8192
    x = jnp.ones((size, size), jnp.bfloat16)
    call = functools.partial(jax.jit(jnp.matmul), x, x)
    jax.block_until_ready(call())
    return 2 * size**3 / programs.fastest_seconds(call)


# ----------------------------------------------------------------------------- float8

_WIDE = GPT2(4, 2048, 16, vocabulary=8192, positions=512)
_POLICIES = {
    "bfloat16": dpmp.Policy.from_name("mixed_bfloat16"),
    "float8": dpmp.Policy.from_name("float8"),
}
_ENGINES: dict[str, Callable[..., Any]] = {
    "plain": jax.grad,
    "book-keeping, float32": functools.partial(_CLIP, **_FLOATS),
    "per example, exact": functools.partial(_CLIP, microbatch_size=4, **_EXACT),
}


def run_float8(session: Session) -> None:
    """Steps; the products are in the part "products"."""
    shape, size = (TINY_GPT2, (4, 8)) if session.is_tiny else (_WIDE, (32, 256))

    def make_args() -> tuple[Any, jax.Array]:
        key = jax.random.key(0)
        return shape.init(key), jax.random.randint(key, size, 0, shape.vocabulary)

    def step(policy: dpmp.Policy, make: Any, params: Any, tokens: jax.Array) -> Any:
        grad_fn = make(policy.in_product_precision(shape.loss_fn()))
        return grad_fn(policy.cast_to_compute(params), tokens)

    steps = {
        f"{engine}, {dtype}": functools.partial(step, policy, make)
        for engine, make in _ENGINES.items()
        for dtype, policy in _POLICIES.items()
    }
    programs.compare(
        session,
        steps,
        make_args,
        reference="plain, bfloat16",
        has_early_lines=True,
        more=lambda _: {"shape": shape._asdict(), "tokens": size},
    )
