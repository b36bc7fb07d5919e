"""Replays a run on neighbouring data, with the released gradients of the first run.

If the noisy gradients are the same in two runs, then everything else that a run
releases must be the same, bit for bit: nothing but the mechanism may depend on one
example. And what the mechanism receives may differ by one contribution at most. This
finds losses, optimizers, callbacks and sources that tell about an example besides the
noisy gradient, and clipping that lets too much of an example through.

The example takes part in every second step. In the other steps, the sums must be the
same: a scale or a statistic that remembers the example would change them.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import io
import logging
import math
import pathlib
import shutil
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import io_callback

from dpmp import _plain_text, _validate
from dpmp._typing import PyTree
from dpmp.mechanism import DPSGD
from dpmp.numerics import is_grid
from dpmp.sources import Source, loader_of
from dpmp.tools.audit._attacker import name_of
from dpmp.training import DPTrainer, TrainingState

# For the norm of a change, which is computed in float64.
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True)
class ReplayAudit:
    """What a replay found; `str` describes it.

    Attributes:
      largest_change: the largest change of a sum, over the change that is allowed.
      differs: what else was different in the second run, in words.
      mechanism: what a step of the mechanism costs; "" if that is private.
    """

    largest_change: float
    differs: tuple[str, ...]
    mechanism: str

    @property
    def passed(self) -> bool:
        """Whether the run reveals no more than the mechanism allows."""
        return self.largest_change <= 1 + _ROUNDING and not self.differs

    def __str__(self) -> str:
        verdict = "Nothing else differs." if not self.differs else "These differ too:"
        if not self.largest_change:
            verdict += " Choose an example with a gradient, which tells more."
        change = "FALSE" if self.largest_change > 1 + _ROUNDING else "as claimed"
        head = _plain_text.paragraph(
            f"One example changes the sum of clipped gradients by at most "
            f"{self.largest_change:.4f} of the sensitivity ({change}). {verdict}"
        )
        return "\n".join([head, *(f"- {x}" for x in self.differs)])


def replay(
    trainer: DPTrainer,
    params: PyTree,
    source: PyTree | Source,
    *,
    index: int = 0,
    neighbour: PyTree | Source | None = None,
    steps: int = 4,
    callback: Callable[[TrainingState], Any] | None = None,
    sensitive_callback: Callable[[Any], None] | None = None,
    files: str | pathlib.Path | None = None,
) -> ReplayAudit:
    """Checks that a run reveals nothing about an example but noisy gradients.

    It makes some steps of the run twice: on neighbouring data, and on the data. The
    second run receives the noisy gradients of the first one. Neither the two runs nor
    the result have a privacy guarantee: keep what they print or write to yourself.

    Args:
      trainer: the trainer of the run.
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
    _validate.instance(DPTrainer, "Use dpmp.DPTrainer(...).", trainer=trainer)
    _validate.optional(functools.partial(_validate.function, "state"))(
        callback=callback
    )
    _validate.require(
        not isinstance(params, TrainingState),
        "params must be the initial parameters. Pass what trainer.init is given.",
        type="TrainingState",
    )
    mechanism = trainer.mechanism
    steps = _validate.integer_in(
        range(2, 2**30),
        "steps must be an integer of at least 2. In step 2, the example takes no part.",
        steps=steps,
    )
    index = _validate.integer_in(
        range(mechanism.num_examples),
        "index must be the number of an example. Use 0 to "
        f"{mechanism.num_examples - 1}.",
        index=index,
    )
    _validate.require(
        _may_be_neighbour(source, neighbour, index),
        "neighbour must have another example than the data at this index, and the same "
        "ones at all others. Pass the index in which the two differ.",
        index=index,
    )
    _validate.require(
        mechanism.is_private and steps <= mechanism.iterations,
        "the mechanism must be private, and plan at least as many steps",
        noise_multiplier=mechanism.noise_multiplier,
        iterations=mechanism.iterations,
        steps=steps,
        fix="Use mechanism.calibrate(epsilon=, delta=), or fewer steps.",
    )

    folder = None if files is None else pathlib.Path(files)
    _validate.require(
        folder is None or (folder.is_dir() and not any(folder.glob("*"))),
        "files must be an empty directory. Let callbacks write to a new one.",
        files=str(folder),
    )

    def run(data: Any, tape: _Tape) -> _Tape:
        audited = DPTrainer(
            mechanism=_taped(mechanism, tape),
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

        with tape.watching():
            audited.fit(
                audited.init(params),
                data,
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
    first = run(other, _Tape(index, is_in=neighbour is not None))
    second = run(source, _Tape(index, is_in=True, first=first))
    differs = first.differences(second)
    if first.error is not None and "the error" not in differs:
        raise first.error
    pairs = zip(first.sums, second.sums, strict=False)
    changes = [float(np.linalg.norm(a - b)) for a, b in pairs] or [math.inf]
    contribution = mechanism.stddev / (mechanism.noise_multiplier or math.nan)
    # A neighbour leaves one example out, and puts another one in.
    allowed = contribution * (1 if neighbour is None else 2)
    if any(changes[1::2]):
        differs.insert(0, "the sum of a step without the example")
    return ReplayAudit(max(changes) / allowed, tuple(differs), name_of(mechanism))


def _may_be_neighbour(source: Any, neighbour: Any, index: int) -> bool:
    """Whether two datasets differ in an example and nowhere else, if they are arrays.

    Other sources are not asked: one that remembers must not see it before the run.
    """
    if neighbour is None:
        return True
    loaders = [loader_of(x, None) for x in (source, neighbour)]
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


class _Tape:
    """Records a run, and plays the noisy gradients of the first one to the second."""

    def __init__(self, index: int, *, is_in: bool, first: "_Tape | None" = None):
        self.index, self.is_in, self._first = index, is_in, first
        self.sums: list[np.ndarray] = []  # of each step in one vector, sensitive
        self.error: Exception | None = None
        self._noisy: list[list[np.ndarray]] = []
        self._seen: dict[str, list[Any]] = collections.defaultdict(list)
        self._num_traces = 0

    def add(self, name: str, value: PyTree) -> None:
        """Records something that a run shows."""
        leaves, structure = jax.tree.flatten(jax.tree.map(_without_keys, value))
        arrays = [np.asarray(x) for x in leaves]
        shown = [repr(x) if x.dtype == object else x.tobytes() for x in arrays]
        types = [(x.shape, x.dtype) for x in arrays]
        self._seen[name].append((str(structure), types, shown))

    def counting(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Counts how often a loss is traced, which compilations show."""

        @functools.wraps(loss_fn)
        def counted(*args: Any) -> Any:
            self._num_traces += 1
            return loss_fn(*args)

        return counted

    def draw(self, indices: np.ndarray, step: int, size: int) -> np.ndarray:
        """Puts the example, or padding, into a batch of every second step."""
        others = indices[indices != self.index]
        if step % 2:
            return others
        own = [self.index if self.is_in else -1]
        return np.concatenate([own, others[: size - 1]])

    def exchange(
        self, sums: list[Any], noisy: list[Any], units: list[float]
    ) -> list[np.ndarray]:
        """Records a step, and returns the noisy gradients with which it goes on."""
        flat = [
            unit * np.asarray(x, np.float64).ravel()
            for unit, x in zip(units, sums, strict=True)
        ]
        self.sums.append(np.concatenate(flat))
        if self._first is not None and len(self.sums) <= len(self._first._noisy):
            return self._first._noisy[len(self.sums) - 1]
        self._noisy.append([np.array(x) for x in noisy])
        return self._noisy[-1]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Records what the block prints, logs, warns of and raises."""
        output, logger, messages = io.StringIO(), logging.getLogger(), list[str]()
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())
        logger.addHandler(handler)
        with (
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            try:
                yield
                jax.effects_barrier()
            except Exception as error:
                if isinstance(error, _validate.RefusedError) and not self.sums:
                    raise  # nothing was trained on
                self.error = error
                self.add("the error", f"{type(error).__name__}: {error}")
            finally:
                logger.removeHandler(handler)
        self.add("the text it prints", output.getvalue())
        self.add("the log", messages)
        self.add("a warning", [str(x.message) for x in caught])
        self.add("the number of compilations", self._num_traces)

    def differences(self, other: "_Tape") -> list[str]:
        """What the other run shows in another way."""
        names = dict.fromkeys([*self._seen, *other._seen])
        return [x for x in names if self._seen.get(x) != other._seen.get(x)]


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


def _without_keys(x: Any) -> Any:
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


def _taped(mechanism: DPSGD, tape: _Tape) -> DPSGD:
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
                sums = jax.tree.leaves(updates, is_leaf=is_grid)
                units = [x.unit if is_grid(x) else 1.0 for x in sums]
                arrays = [x.counts if is_grid(x) else x for x in sums]
                leaves, structure = jax.tree.flatten(noisy)
                exchange = functools.partial(tape.exchange, units=units)
                played = io_callback(exchange, leaves, arrays, leaves)
                return structure.unflatten(played), state

            return optax.GradientTransformation(real.init, update)

    values = {x.name: getattr(mechanism, x.name) for x in dataclasses.fields(DPSGD)}
    return Taped(**values)
