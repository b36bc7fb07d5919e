"""Replays a run on neighbouring data, with the released gradients of the first run.

If the noisy gradients are the same in two runs, then everything else that a run
releases must be the same, bit for bit: nothing but the mechanism may depend on one
example. And what the mechanism receives may differ by one contribution at most. This
finds losses, optimizers, callbacks and sources that tell about an example besides the
noisy gradient, and clipping that lets too much of an example through.

The example takes part in every second step. In the other steps, the sums must be the
same: a scale or a statistic that remembers the example would change them.
"""

import dataclasses
import functools
import hashlib
import math
import pathlib
import shutil
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
import optax
from jax.experimental import io_callback

from dpmp import _plain_text, _validate
from dpmp._typing import PyTree
from dpmp.mechanism import DPSGD
from dpmp.sources import Source, loader_of
from dpmp.tools.audit._attacker import name_of
from dpmp.tools.audit._sums import ROUNDING
from dpmp.tools.audit._tape import Tape
from dpmp.training import DPTrainer, TrainingState


@dataclasses.dataclass(frozen=True)
class ReplayAudit:
    """What a replay found; `str` describes it.

    Attributes:
      largest_change: the largest change of a sum, over the change that is allowed.
      differs: what else was different in the second run, in words.
      mechanism: what a step of the mechanism costs; "" if that is private.
      has_preparation: whether a function prepared both runs, so that what it took from
        the data was under audit.
    """

    largest_change: float
    differs: tuple[str, ...]
    mechanism: str
    has_preparation: bool

    @property
    def passed(self) -> bool:
        """Whether the run reveals no more than the mechanism allows."""
        return self.largest_change <= 1 + ROUNDING and not self.differs

    def __str__(self) -> str:
        verdict = "Nothing else differs." if not self.differs else "These differ too:"
        if not self.largest_change:
            verdict += " Choose an example with a gradient, which tells more."
        if not (self.differs or self.has_preparation):
            verdict += (
                " What the trainer and callbacks took from the data before was not "
                "under audit: pass a function that prepares the run."
            )
        change = "FALSE" if self.largest_change > 1 + ROUNDING else "as claimed"
        head = _plain_text.paragraph(
            f"One example changes the sum of clipped gradients by at most "
            f"{self.largest_change:.4f} of the sensitivity ({change}). {verdict}"
        )
        return "\n".join([head, *(f"- {x}" for x in self.differs)])


Callback: TypeAlias = Callable[[TrainingState], Any] | None


def replay(
    trainer: DPTrainer | Callable[[Any], tuple[DPTrainer, Any, Callback]],
    params: PyTree,
    source: PyTree | Source,
    *,
    index: int = 0,
    neighbour: PyTree | Source | None = None,
    steps: int = 4,
    callback: Callback = None,
    sensitive_callback: Callable[[Any], None] | None = None,
    files: str | pathlib.Path | None = None,
) -> ReplayAudit:
    """Checks that a run reveals nothing about an example but noisy gradients.

    It makes some steps of the run twice: on neighbouring data, and on the data. The
    second run receives the noisy gradients of the first one. Neither the two runs nor
    the result have a privacy guarantee: keep what they print or write to yourself.

    Args:
      trainer: the trainer of the run. Or a function of `source`, and of a `neighbour`,
        that prepares the run: it returns the trainer, the data to train on, and the
        callback or None. Then whatever is computed from the data beforehand is under
        audit too: statistics, a vocabulary, a callback that holds the data.
      params: the initial parameters.
      source: the data; see `DPTrainer.fit`. If it is an object that remembers what it
        was asked for, pass an `index` above 1: a run looks at examples 0 and 1 first.
      index: the example in which the two datasets differ. Extreme examples find most:
        one with huge or with no gradients, or with NaN.
      neighbour: the other data, of the same size, with another example at `index`. By
        default, this example is left out.
      steps: the number of steps. The example takes part in steps 1, 3, ...
      callback: see `DPTrainer.fit`. Both runs call it, and the dicts that it returns
        must be the same. So leave out times, and counters that go on in the next run.
      sensitive_callback: see `DPTrainer.fit`.
      files: a directory that your callbacks write to, which must be empty. Both runs
        must write the same files, which are then removed.

    Returns:
      The changes of the sums, and what else differs.

    Raises:
      ValueError: if the mechanism has no clipping or no noise, or for an argument out
        of range.
      Exception: whatever both runs raise.
    """
    prepare = _preparation(trainer, callback)
    if prepare is trainer and neighbour is None:
        _validate.fail(
            "a function that prepares the run must have another dataset to prepare it "
            "for. Pass neighbour=, with another example at index.",
            neighbour=None,
        )
    if prepare is trainer and callback is not None:
        _validate.fail(
            "a function that prepares the run must return the callback. Leave "
            "callback= out.",
            callback=callback,
        )
    if isinstance(params, TrainingState):
        _validate.fail(
            "params must be the initial parameters. Pass what trainer.init is given.",
            type="TrainingState",
        )
    steps = _validate.integer_in(
        range(2, 2**30),
        "steps must be an integer of at least 2. In step 2, the example takes no part.",
        steps=steps,
    )
    if not _may_be_neighbour(source, neighbour, index):
        _validate.fail(
            "neighbour must have another example than the data at this index, and the "
            "same ones at all others. Pass the index in which the two differ.",
            index=index,
        )
    folder = None if files is None else pathlib.Path(files)
    if folder is not None and (not folder.is_dir() or any(folder.glob("*"))):
        _validate.fail(
            "files must be an empty directory. Let callbacks write to a new one.",
            files=str(folder),
        )

    def run(data: Any, tape: Tape) -> Tape:
        with tape.watching():
            trainer, rows, callback = tape.run = _prepared(prepare, data)
            _check(trainer.mechanism, index, steps)
            tape.add("the mechanism", repr(trainer.mechanism))
            audited = DPTrainer(
                mechanism=_taped(trainer.mechanism, tape),
                loss_fn=tape.counting(trainer.loss_fn),
                optimizer=trainer.optimizer,
                policy=trainer.policy,
                uses_prng_key=trainer.uses_prng_key,
                loss_scale=trainer.loss_scale,
                prng_key=jax.random.key(0),
            )

            def released(state: TrainingState) -> Any:
                tape.add("the state", state._replace(spent=None))
                returned = callback(state) if callback else None
                tape.add("the return value of the callback", returned)
                return returned

            audited.fit(
                audited.init(params),
                rows,
                stop_at=steps,
                callback=released,
                sensitive_callback=sensitive_callback,
                progress=False,
                prefetch=0,
            )
        if folder is not None:
            tape.add("a file", _taken(folder))
        return tape

    # In this order, a source that remembers has not seen the example in the first run.
    other = source if neighbour is None else neighbour
    first = run(other, Tape(index, is_in=neighbour is not None))
    second = run(source, Tape(index, is_in=True, first=first))
    differs = first.differences(second)
    has_run = first.run or second.run
    if first.error is not None and ("the error" not in differs or not has_run):
        raise first.error
    pairs = zip(first.sums, second.sums, strict=False)
    changes = [float(np.linalg.norm(a - b)) for a, b in pairs] or [math.inf]
    mechanism = next(x.run[0].mechanism for x in (first, second) if x.run)
    contribution = mechanism.stddev / (mechanism.noise_multiplier or math.nan)
    # A neighbour leaves one example out, and puts another one in.
    allowed = contribution * (1 if neighbour is None else 2)
    if any(changes[1::2]):
        differs.insert(0, "the sum of a step without the example")
    # What both runs share was made before, from data that both have seen.
    shared = [
        x is y for x, y in zip(first.run or (), second.run or (), strict=False) if x
    ]
    return ReplayAudit(
        max(changes) / allowed,
        tuple(differs),
        name_of(mechanism),
        has_preparation=not any(shared) and sensitive_callback is None,
    )


def _check(mechanism: DPSGD, index: int, steps: int) -> None:
    _validate.integer_in(
        range(mechanism.num_examples),
        "index must be the number of an example. Use 0 to "
        f"{mechanism.num_examples - 1}.",
        index=index,
    )
    if not (mechanism.is_private and steps <= mechanism.iterations):
        _validate.fail(
            "the mechanism must be private, and plan at least as many steps",
            noise_multiplier=mechanism.noise_multiplier,
            iterations=mechanism.iterations,
            steps=steps,
            fix="Use mechanism.calibrate(epsilon=, delta=), or fewer steps.",
        )


def _preparation(trainer: Any, callback: Callback) -> Callable[..., Any]:
    """The function that prepares a run on the data that it is given."""
    if isinstance(trainer, DPTrainer):
        return lambda data: (trainer, data, callback)
    if not callable(trainer):
        _validate.fail(
            "trainer must be a DPTrainer, or a function that prepares the run from "
            "its data. Use dpmp.DPTrainer(...).",
            type=type(trainer).__name__,
        )
    return trainer


def _prepared(prepare: Callable[..., Any], data: Any) -> tuple[DPTrainer, Any, Any]:
    run = prepare(data)
    if not isinstance(run, tuple) or len(run) != 3 or not isinstance(run[0], DPTrainer):
        _validate.fail(
            "the function that prepares the run must return the trainer, the data and "
            "the callback. Return (trainer, data, None) without a callback.",
            type=type(run).__name__,
        )
    _validate.optional(functools.partial(_validate.function, "state"))(callback=run[2])
    return run


def _may_be_neighbour(source: Any, neighbour: Any, index: int) -> bool:
    """Whether two datasets, if they are arrays, differ in this example alone."""
    if neighbour is None:
        return True
    loaders = [loader_of(x, None) for x in (source, neighbour)]
    # A source that remembers must not see the example before the run.
    if not all(x.is_arrays for x in loaders):
        return True
    one, other = (jax.tree.leaves(x.rows(np.arange(x.num_examples))) for x in loaders)
    if [(x.dtype, x.shape) for x in one] != [(x.dtype, x.shape) for x in other]:
        return True  # which is refused with more to say
    differing = {
        i
        for x, y in zip(one, other, strict=True)
        for i in range(len(x))
        if x[i].tobytes() != y[i].tobytes()
    }
    return differing == {index}


def _taken(folder: pathlib.Path) -> dict[str, str]:
    """The hashes of all files by their paths in a folder, which is emptied."""
    found = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    for path in folder.glob("*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return found


def _taped(mechanism: DPSGD, tape: Tape) -> DPSGD:
    """The mechanism, whose noisy gradients come from a tape, and whose batches do."""

    class Taped(DPSGD):
        """A mechanism under audit."""

        @property
        def batch_selection_strategy(self) -> Any:
            return self

        def drawer(self, num_examples: int, *, start: int = 0) -> Any:
            draw = super().batch_selection_strategy.drawer(num_examples, start=start)
            size = self.padded_batch_size
            return lambda step, key: tape.draw(draw(step, key), step, size)

        def privatizer(self, prng_key: Any = None) -> optax.GradientTransformation:
            real = super().privatizer(prng_key)

            def update(updates: PyTree, state: Any, params: Any = None) -> Any:
                noisy, state = real.update(updates, state, params)
                return io_callback(tape.exchange, noisy, updates, noisy), state

            return optax.GradientTransformation(real.init, update)

    values = {x.name: getattr(mechanism, x.name) for x in dataclasses.fields(DPSGD)}
    return Taped(**values)
