"""What a replayed run shows, and the noisy gradients that a second run receives."""

import collections
import contextlib
import functools
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.tools.audit._sums import as_vector


class Tape:
    """Records a run, and plays the noisy gradients of the first one to the second."""

    def __init__(self, index: int, *, is_in: bool, first: "Tape | None" = None):
        self.index, self.is_in, self._first = index, is_in, first
        self.sums: list[np.ndarray] = []  # of each step in one vector, sensitive
        self.error: Exception | None = None
        self.run: tuple[Any, Any, Any] | None = None  # trainer, data and callback
        self._noisy: list[PyTree] = []
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

    def exchange(self, sums: PyTree, noisy: PyTree) -> PyTree:
        """Records a step, and returns the noisy gradients with which it goes on."""
        self.sums.append(as_vector(sums))
        if self._first is not None and len(self.sums) <= len(self._first._noisy):
            return self._first._noisy[len(self.sums) - 1]
        self._noisy.append(jax.tree.map(np.array, noisy))
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

    def differences(self, other: "Tape") -> list[str]:
        """What the other run shows in another way."""
        names = dict.fromkeys([*self._seen, *other._seen])
        return [x for x in names if self._seen.get(x) != other._seen.get(x)]


def _without_keys(x: Any) -> Any:
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x
