"""Nothing that a run writes or says shows an example or a key.

The data hold numbers and a word that are found nowhere else. They and all words of all
keys are looked for in the output, log lines, warnings, the error with its notes, and
all files, of runs that succeed and of runs that fail in many ways.
"""

import contextlib
import functools
import logging
import shutil
import traceback
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import FailureError, fails_at, known_bits, new_trainer, places_of_keys

import dpmp

SIZE = 24
NUMBERS = (23456.789, 76543.211)
WORD = "quetzalcoatlus"
ROWS = {
    "x": np.full((SIZE, 3), NUMBERS[0], np.float32),
    "y": np.full(SIZE, NUMBERS[1], np.float32),
}
PARAMS = jnp.zeros(3)


class Source:
    """Changes the batches from the third one on, after the probe and an empty one."""

    def __init__(self, change=lambda rows: rows):
        self.change, self.calls = change, 0

    def __len__(self):
        return SIZE

    def __getitem__(self, indices):
        if not np.ndim(indices):
            raise TypeError("an array, please")
        self.calls += 1
        rows = {name: x[indices] for name, x in ROWS.items()}
        return self.change(rows) if self.calls > 3 else rows


def make_trainer(num_examples=SIZE):
    return new_trainer(
        num_examples=num_examples,
        expected_batch_size=8,
        iterations=6,
        released_metrics=dpmp.ReleasedMetrics(largest_loss=8.0),
        loss_fn=lambda w, batch: jnp.mean((batch["x"] @ w - batch["y"]) ** 2),
    )


default_trainer = functools.cache(make_trainer)


def run(directory, source=None, *, debug_nans=False, trainer=None, **kwargs):
    trainer = default_trainer() if trainer is None else trainer
    options = {"checkpoint_dir": directory, "every": 2} | kwargs
    source = source if hasattr(source, "keys") else Source(source or (lambda x: x))
    with jax.debug_nans(debug_nans):  # jax would say which step has a NaN
        return trainer.fit(trainer.init(PARAMS), source, **options)


def fill_the_disk(directory, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    run(directory, callback=lambda state: monkeypatch.setattr("os.pwrite", full))


def damage_a_checkpoint(directory, _):
    with contextlib.suppress(FailureError):
        run(directory, callback=fails_at(4))
    for file in (directory / "checkpoints").rglob("*"):
        if file.is_file():
            content = bytearray(file.read_bytes())
            content[len(content) // 2 :] = b"\x00" * (len(content) - len(content) // 2)
            file.write_bytes(content)
    run(directory)


def change_the_number_of_examples(directory, _):
    with contextlib.suppress(FailureError):
        run(directory, callback=fails_at(4))
    more = jax.tree.map(lambda x: np.append(x, x[:1], axis=0), ROWS)
    run(directory, more, trainer=make_trainer(num_examples=SIZE + 1))


def lose_a_checkpoint(directory, _):
    run(directory, stop_at=3)
    shutil.rmtree(directory / "checkpoints" / "3")
    run(directory)


def stop(rows):
    raise KeyboardInterrupt


def with_text(rows):
    return rows | {"y": np.array([WORD] * len(rows["y"]), object)}


# What happens in a run, and a part of the error, if there is one.
ACTIONS = {
    "success": (
        lambda path, _: run(path, callback=lambda x: {"weight": float(x.params[0])}),
        None,
    ),
    "NaN": (
        lambda path, _: run(
            path, lambda rows: rows | {"x": rows["x"] * np.nan}, debug_nans=True
        ),
        None,
    ),
    "bad record": (lambda path, _: run(path, with_text), "examples must be numbers"),
    "another shape": (
        lambda path, _: run(path, lambda rows: rows | {"x": rows["x"][:, :2]}),
        "same tree, shapes and dtypes",
    ),
    "too few rows": (
        lambda path, _: run(path, lambda rows: rows | {"x": ROWS["x"]}),
        "one row for each index",
    ),
    "callback fails": (lambda path, _: run(path, callback=fails_at(4)), ""),
    "callback returns an array": (
        lambda path, _: run(path, callback=lambda state: {"loss": ROWS["y"]}),
        "must be a real scalar",
    ),
    "full disk": (fill_the_disk, "No space left on device"),
    "damaged checkpoint": (
        damage_a_checkpoint,
        "at least one checkpoint must be whole",
    ),
    "another number of examples": (
        change_the_number_of_examples,
        "must go on with the number of examples",
    ),
    "interrupt": (lambda path, _: run(path, stop), ""),
    "lost checkpoint": (lose_a_checkpoint, None),
}


def everything_shown(action, directory, monkeypatch, capsys, caplog):
    """Runs it; returns the exception, and all that it wrote and said, by place."""
    caplog.set_level(logging.INFO)
    error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            action(directory, monkeypatch)
        except (Exception, KeyboardInterrupt) as e:
            error = e
    monkeypatch.undo()
    output = capsys.readouterr()
    shown = {"output": output.out + output.err, "log": caplog.text}
    shown["warnings"] = "\n".join(str(x.message) for x in caught)
    shown["error"] = "".join(traceback.format_exception(error)) if error else ""
    shown["error"] += repr(error)
    content = {name: text.encode() for name, text in shown.items()}
    for path in directory.rglob("*"):
        if path.is_file():
            content[str(path.relative_to(directory))] = path.read_bytes()
    return error, content


def places_of_secrets(content, words):
    """The places that have a key, or the data: as text, as bytes, or as a word."""
    found = {WORD.encode(), *(np.float32(x).tobytes() for x in NUMBERS)}
    found |= {str(np.float32(x))[:6].encode() for x in NUMBERS}
    places = {place for place, x in content.items() if any(s in x for s in found)}
    return places | places_of_keys(words, content)


@pytest.mark.parametrize("name", ACTIONS)
def test_nothing_shows_an_example_or_a_key(name, tmp_path, monkeypatch, capsys, caplog):
    words = known_bits(monkeypatch)
    action, said = ACTIONS[name]
    error, content = everything_shown(action, tmp_path, monkeypatch, capsys, caplog)
    assert (error is None) == (said is None)
    assert (said or "") in str(error)
    places = {"ledger.jsonl", "metrics.jsonl", "lock"}
    assert content.keys() >= places
    if name == "success":
        assert b"epsilon" in content["output"]
        assert b"public/weight" in content["metrics.jsonl"]
    assert len(words) >= 3
    assert places_of_secrets(content, words) == set()


def test_a_leak_would_be_found(tmp_path, monkeypatch, capsys, caplog):
    words = known_bits(monkeypatch)

    def leak(directory, monkeypatch):
        def callback(state):
            if int(state.step) == 6:
                word = np.frombuffer(words[0], np.uint32)[3]
                logging.getLogger("dpmp").warning("sampling %s", word)
                raise RuntimeError(f"the record says {WORD}")
            print(ROWS["x"][0, 0])
            return {"loss": float(ROWS["y"][0])}

        run(directory, callback=callback)

    _, content = everything_shown(leak, tmp_path, monkeypatch, capsys, caplog)
    places = places_of_secrets(content, words)
    assert places == {"metrics.jsonl", "output", "log", "error"}
