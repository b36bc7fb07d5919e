"""What private fine-tuning of decoders costs: one of 135M parameters, and one of 1B.

The models are Llamas of `examples/llm` with random weights: of the shape of
SmolLM2-135M at 512 tokens, and of a model with a billion parameters at 1024 tokens.
Their layers are a loop, and the backward pass computes the activations inside a layer
again. Contenders map float32 masters and a batch to the gradient of the mean loss
("plain"), or to a clipped sum by book-keeping, bounded and in float32: of all
parameters ("full"), or of adapters of rank 8 in all matrices ("LoRA"), next to frozen
bfloat16 parameters.

"share_of_peak" is the rate at which the operations of the model are done, over that of
a large product of bfloat16 matrices. Counted are 6 operations for each parameter and
token, or 4 where the matrices are frozen, and nothing for attention, norms and
activations that are computed again (Kaplan et al., 2020,
https://arxiv.org/abs/2001.08361, section 2.1).
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import dpmp
from benchmarks.gpu import programs
from benchmarks.gpu.programs import Program
from benchmarks.gpu.session import Session
from dpmp import lora
from examples import llm
from examples.llm import pretrained
from examples.llm._config import Config

_ARITHMETICS = {"bounded": "bounded", "float32": "unproved_float32"}
_RANK, _TARGETS = 8, "layers/.*kernel"
_OPERATIONS = {"full": 6, "LoRA": 4}  # for each parameter and token


class Subject(NamedTuple):
    """A model, and what it is run with.

    Attributes:
      config: of the model.
      batch_size: number of sequences.
      length: of a sequence.
      microbatch_sizes: of book-keeping, by what is trained, the most promising first.
    """

    config: Config
    batch_size: int
    length: int
    microbatch_sizes: dict[str, tuple[int, ...]]


def _llama(**sizes: Any) -> Config:
    return Config(architecture="llama", norm_epsilon=1e-5, **sizes)


SUBJECTS = {
    "smollm2": Subject(
        _llama(
            vocabulary_size=49152,
            width=576,
            num_layers=30,
            num_heads=9,
            num_key_value_heads=3,
            head_width=64,
            hidden_width=1536,
            context=2048,
        ),
        batch_size=32,
        length=512,
        microbatch_sizes={"LoRA": (32, 8), "full": (8, 4)},
    ),
    "decoder": Subject(
        _llama(
            vocabulary_size=32768,
            width=2048,
            num_layers=18,
            num_heads=16,
            num_key_value_heads=16,
            head_width=128,
            hidden_width=5632,
            context=1024,
        ),
        batch_size=8,
        length=1024,
        microbatch_sizes={"LoRA": (8, 4), "full": (2, 4)},
    ),
}
TINY = Subject(
    _llama(
        vocabulary_size=40,
        width=16,
        num_layers=2,
        num_heads=2,
        num_key_value_heads=1,
        head_width=8,
        hidden_width=24,
        context=16,
    ),
    batch_size=4,
    length=8,
    microbatch_sizes={"LoRA": (4,), "full": (2,)},
)


def run(session: Session, model: str) -> None:
    """Measures, or compiles, all contenders for one model."""
    subject = TINY if session.is_tiny else SUBJECTS[model]
    if session.compile_only:
        args = jax.eval_shape(functools.partial(arguments, subject))
        named = {f"{model}, {k}": p for k, p in steps(subject, args).items()}
        programs.compile_all(session, named)
        return
    args = arguments(subject)
    trials = dict(programs.try_all(session, steps(subject, args), args))
    rate = _rate_of_products(session)
    calls = {name: trial.call for name, trial in trials.items()}
    rounds = 3 if session.is_tiny else 10
    seconds = programs.in_turn(session, calls, rounds=rounds)
    for trained in _OPERATIONS:
        timed = {k: x for k, x in seconds.items() if k.startswith(trained)}
        figures = programs.summarize(timed, reference=f"{trained}, plain")
        if not figures["milliseconds"]:
            continue
        operations = _operations(subject, args[0], trained)
        session.record(
            "comparison",
            model=model,
            trained=trained,
            batch_size=subject.batch_size,
            length=subject.length,
            rounds=min(map(len, timed.values())),
            **figures,
            share_of_peak={
                name: round(operations / (1e-3 * milliseconds) / rate, 3)
                for name, milliseconds in figures["milliseconds"].items()
            },
            products_teraflops_per_second=round(rate / 1e12, 1),
        )


def arguments(subject: Subject) -> tuple[Any, Any, Any, dict[str, jax.Array]]:
    """Float32 parameters, frozen bfloat16 ones, adapters and a batch, all random."""
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


def steps(subject: Subject, args: tuple[Any, ...]) -> dict[str, Program]:
    """The programs of all contenders, the most important first."""
    graphdef, _ = pretrained.define(subject.config, remat=True)
    loss_fn = functools.partial(llm.mean_nats, pretrained.apply_fn(graphdef))
    clip = functools.partial(dpmp.clipped_grad, l2_clip_norm=1.0, method="book_keeping")

    def full(make_grad_fn: Any, params: Any, frozen: Any, _: Any, batch: Any) -> Any:
        del frozen
        return make_grad_fn(loss_fn)(_in_bfloat16(params), batch)

    def of_adapters(
        make_grad_fn: Any, params: Any, frozen: Any, adapters: Any, batch: Any
    ) -> Any:
        del params
        adapted = lora.apply(loss_fn, frozen)
        return make_grad_fn(adapted)(_in_bfloat16(adapters), batch)

    makers = {"LoRA": of_adapters, "full": full}
    named: dict[str, Program] = {}
    for trained, step in makers.items():
        plain = functools.partial(step, jax.grad)
        named[f"{trained}, plain"] = Program(plain, args)
        for size, (name, arithmetic) in itertools.product(
            subject.microbatch_sizes[trained], _ARITHMETICS.items()
        ):
            make_grad_fn = functools.partial(
                clip, microbatch_size=size, arithmetic=arithmetic
            )
            fun = functools.partial(step, make_grad_fn)
            named[f"{trained}, book-keeping, {name}, {size}"] = Program(fun, args)
    return named


def _in_bfloat16(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


def _operations(subject: Subject, params: Any, trained: str) -> float:
    """Of the model, in one step."""
    num_parameters = sum(x.size for x in jax.tree.leaves(params))
    num_tokens = subject.batch_size * subject.length
    return float(_OPERATIONS[trained] * num_parameters * num_tokens)


def _rate_of_products(session: Session) -> float:
    """Operations in a second, of a large product of bfloat16 matrices."""
    size = 64 if session.is_tiny else 8192
    x = jnp.ones((size, size), jnp.bfloat16)
    product = jax.jit(jnp.matmul)
    call = functools.partial(product, x, x)
    programs.seconds_of(call)
    return 2 * size**3 / min(programs.seconds_of(call, queued=10) for _ in range(5))
