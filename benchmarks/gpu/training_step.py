"""What clipped sums cost beside plain training: GPT-2, bfloat16, sequences of 100.

Every contender maps float32 masters and a batch to gradients, or to their clipped sum;
the cast to bfloat16 is a part of that, the optimizer and the noise are not. There are

    plain                      `jax.grad` of the mean loss
    book-keeping, float32      sums in floats, with a sensitivity that is not proved
    book-keeping, bounded      the same with a sensitivity that is proved
    per example, exact         vmap, with integer sums
    jax_privacy                where it is installed

A line is written when a contender has run, and one for the best of each kind, timed in
turn, whenever that changed.

References, for fine-tuning of the same models:
  Bu et al.: Differentially private optimization on large model at small cost, 2022:
  0.80, 0.80 and 0.87 of the speed of plain training (GPT-2 small, medium and large).
  FlashDP, 2025: 0.90.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import dpmp
from benchmarks import gpt2
from benchmarks.gpu import programs
from benchmarks.gpu.programs import Program
from benchmarks.gpu.session import Session
from dpmp.numerics import ExactSums


class Subject(NamedTuple):
    """A model, and what it is run with.

    Attributes:
      shape: of the model.
      batch_size: number of sequences.
      microbatch_sizes: by kind, the most promising first; None is the whole batch.
      length: of a sequence.
      speed_of_fastdp: over the speed of plain training, as published.
      resolution: of exact sums; None for the default, which is too coarse for the
        entries of the largest model.
    """

    shape: gpt2.Shape
    batch_size: int
    microbatch_sizes: dict[str, tuple[int | None, ...]]
    length: int = 100
    speed_of_fastdp: float | None = None
    resolution: int | None = None


_SPEED_OF_FLASHDP = 0.90


def _sizes(
    in_floats: tuple[int | None, ...], bounded: tuple[int, ...], formed: tuple[int, ...]
) -> dict[str, tuple[int | None, ...]]:
    return {
        "plain": (None,),
        "book-keeping, float32": in_floats,
        "book-keeping, bounded": bounded,
        "per example, exact": formed,
        "jax_privacy": formed,
    }


SUBJECTS = {
    "small": Subject(
        gpt2.SHAPES["small"],
        100,
        _sizes((None, 50, 10, 4), (10, 5, 4), (10, 20, 4)),
        speed_of_fastdp=0.80,
    ),
    "medium": Subject(
        gpt2.SHAPES["medium"],
        50,
        _sizes((None, 25, 10, 5), (10, 5), (5, 10, 2)),
        speed_of_fastdp=0.80,
    ),
    "large": Subject(
        gpt2.SHAPES["large"],
        20,
        _sizes((None, 10, 5), (10, 5, 4), (4, 5, 2)),
        speed_of_fastdp=0.87,
        resolution=2**17,
    ),
}
TINY = Subject(gpt2.TINY, 4, _sizes((None, 2), (2,), (2,)), length=8)


class Contender(NamedTuple):
    """One way to a gradient, or to a sum of clipped ones.

    Attributes:
      kind: what it is compared as.
      microbatch_size: how many sequences at a time; None for all.
      make_grad_fn: gives the function of parameters and tokens, for that size.
      options: of the compiler.
    """

    kind: str
    microbatch_size: int | None
    make_grad_fn: Callable[[int | None], Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """The kind, and how many at a time."""
        return f"{self.kind}, {self.microbatch_size or 'all'}"


def grad_fns(
    loss_fn: Callable[..., Any], resolution: int | None
) -> dict[str, Callable[[int | None], Any]]:
    """For each kind, what makes the function for a microbatch size."""
    clip = functools.partial(dpmp.clipped_grad, loss_fn, l2_clip_norm=1.0)
    makers = {
        "plain": lambda size: jax.grad(loss_fn),
        "book-keeping, float32": lambda size: clip(
            method="book_keeping", arithmetic="unproved_float32", microbatch_size=size
        ),
        "book-keeping, bounded": lambda size: clip(
            method="book_keeping", arithmetic="bounded", microbatch_size=size
        ),
        "per example, exact": lambda size: clip(
            method="per_example",
            arithmetic=ExactSums(resolution) if resolution else "exact",
            microbatch_size=size,
        ),
    }
    try:
        from jax_privacy import clipping as their_clipping
    except ImportError:
        return makers
    theirs = functools.partial(their_clipping.clipped_grad, loss_fn, l2_clip_norm=1.0)
    return {
        "jax_privacy": lambda size: theirs(microbatch_size=size),
        **makers,
    }


# What is proved of "bounded" sums takes sums that are the same whenever they are run.
_OPTIONS = {"book-keeping, bounded": programs.REPEATABLE}
# These go a round later: their programs are those that take long to compile.
_DELAYS = {"per example, exact": 1, "jax_privacy": 1}


def contenders(subject: Subject, *, scan: bool) -> Iterator[Contender]:
    """The most promising microbatch of every kind, then the next of every kind."""
    loss_fn = gpt2.loss_fn(subject.shape, scan=scan)
    makers = grad_fns(loss_fn, subject.resolution)
    places = [
        (i + _DELAYS.get(kind, 0), kind, size)
        for kind in makers
        for i, size in enumerate(subject.microbatch_sizes[kind])
    ]
    for _, kind, size in sorted(places, key=lambda place: place[0]):
        yield Contender(kind, size, makers[kind], _OPTIONS.get(kind, {}))


def arguments(subject: Subject, *, scan: bool) -> tuple[Any, jax.Array]:
    """Float32 parameters and a batch, both random."""
    keys = jax.random.split(jax.random.key(0))
    shape = (subject.batch_size, subject.length)
    tokens = jax.random.randint(keys[0], shape, 0, subject.shape.vocabulary)
    return gpt2.init(subject.shape, keys[1], scan=scan), tokens


def step(contender: Contender, args: tuple[Any, ...]) -> Program:
    """From float32 masters to gradients."""

    def grads(params: Any, tokens: jax.Array) -> Any:
        compute_params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        grad_fn = contender.make_grad_fn(contender.microbatch_size)
        return grad_fn(compute_params, tokens)

    return Program(grads, args, contender.options)


def run(session: Session, model: str) -> None:
    """Measures, or compiles, all contenders for one model."""
    subject = TINY if session.is_tiny else SUBJECTS[model]
    make_args = functools.partial(arguments, subject, scan=session.scan)
    if session.compile_only:
        args = jax.eval_shape(make_args)
        one_each = {c.kind: c for c in [*contenders(subject, scan=session.scan)][::-1]}
        in_order = [*one_each.values()][::-1]
        programs.compile_all(
            session, {f"GPT-2 {model}, {c.name}": step(c, args) for c in in_order}
        )
        return
    _compare(session, subject, model, make_args())


def _compare(
    session: Session, subject: Subject, model: str, args: tuple[Any, ...]
) -> None:
    """Tries all contenders, and times the best of each kind in turn."""
    candidates = {c.name: c for c in contenders(subject, scan=session.scan)}
    trials: dict[str, programs.Trial] = {}
    for name, trial in programs.try_all(
        session, {k: step(c, args) for k, c in candidates.items()}, args
    ):
        before = _best(candidates, trials)
        trials[name] = trial
        best = _best(candidates, trials)
        if best.keys() != before.keys() and len(best) > 1:
            _time_in_turn(session, subject, model, best, rounds=3)
    _time_in_turn(session, subject, model, _best(candidates, trials), rounds=20)


def _best(
    candidates: dict[str, Contender], trials: dict[str, programs.Trial]
) -> dict[str, programs.Trial]:
    """The fastest of each kind, by the names of the contenders."""
    names: dict[str, str] = {}
    for name in sorted(trials, key=lambda name: trials[name].seconds):
        names.setdefault(candidates[name].kind, name)
    return {name: trials[name] for name in names.values()}


def _time_in_turn(
    session: Session,
    subject: Subject,
    model: str,
    best: dict[str, programs.Trial],
    *,
    rounds: int,
) -> None:
    """Writes a line that compares the best of each kind."""
    calls = {name: trial.call for name, trial in best.items()}
    if session.is_tiny:
        rounds = min(rounds, 3)
    seconds = programs.in_turn(session, calls, rounds=rounds)
    figures = programs.summarize(seconds, reference="plain, all")
    session.record(
        "comparison",
        model=model,
        batch_size=subject.batch_size,
        length=subject.length,
        rounds=min(map(len, seconds.values()), default=0),
        **figures,
        speed_of_plain={k: round(1 / x, 3) for k, x in figures["time_ratio"].items()},
        published_speed_of_plain={
            "fastDP": subject.speed_of_fastdp,
            "FlashDP": _SPEED_OF_FLASHDP,
        },
    )
