"""Nothing that a run writes or says shows an example or a key.

The data hold numbers and a word that are found nowhere else. They and all words of all
keys are looked for in the output, log lines, warnings, the error with its notes, and
all files, of runs that succeed and of runs that fail in many ways.
"""

import contextlib
import logging
import shutil
import traceback
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_runs import known_bits, places_of_keys

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
        self.calls += 1
        rows = {name: x[indices] for name, x in ROWS.items()}
        return self.change(rows) if self.calls > 5 else rows


def make_trainer(**fields):
    return dpmp.DPTrainer(
        mechanism=dpmp.DPSGD(
            num_examples=fields.get("num_examples", SIZE),
            expected_batch_size=8,
            iterations=6,
            l2_clip_norm=1.0,
            noise_multiplier=1.0,
            delta=1e-3,
            released_metrics=dpmp.ReleasedMetrics(largest_loss=8.0),
        ),
        loss_fn=lambda w, batch: jnp.mean((batch["x"] @ w - batch["y"]) ** 2),
        optimizer=optax.sgd(0.1),
        policy="float32",
    )


TRAINER = make_trainer()


def run(directory, source=None, *, debug_nans=False, trainer=TRAINER, **kwargs):
    options = {"checkpoint_dir": directory, "every": 2} | kwargs
    source = Source() if source is None else source
    with jax.debug_nans(debug_nans):  # jax would say which step has a NaN
        return trainer.fit(trainer.init(PARAMS), source, **options)


def succeed(directory, monkeypatch):
    run(directory, callback=lambda state: {"weight": float(state.params[0])})


def meet_a_bad_record(directory, monkeypatch):
    def with_text(rows):
        return rows | {"y": np.array([WORD] * len(rows["y"]), object)}

    run(directory, Source(with_text))


def meet_another_shape(directory, monkeypatch):
    run(directory, Source(lambda rows: rows | {"x": rows["x"][:, :2]}))


def meet_too_few_rows(directory, monkeypatch):
    run(directory, Source(lambda rows: rows | {"x": ROWS["x"]}))


def meet_nan(directory, monkeypatch):
    nowhere_finite = Source(lambda rows: rows | {"x": rows["x"] * np.nan})
    run(directory, nowhere_finite, debug_nans=True)


def fail_in_the_callback(directory, monkeypatch):
    def callback(state):
        if int(state.step) == 4:
            raise RuntimeError("the callback failed")

    run(directory, callback=callback)


def return_something_else(directory, monkeypatch):
    run(directory, callback=lambda state: {"loss": ROWS["y"]})


def fill_the_disk(directory, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    def callback(state):
        monkeypatch.setattr("os.pwrite", full)

    run(directory, callback=callback)


def damage_a_checkpoint(directory, monkeypatch):
    with contextlib.suppress(RuntimeError):
        fail_in_the_callback(directory, monkeypatch)
    for file in (directory / "checkpoints").rglob("*"):
        if file.is_file():
            content = bytearray(file.read_bytes())
            content[len(content) // 2 :] = b"\x00" * (len(content) - len(content) // 2)
            file.write_bytes(content)
    run(directory)


def change_the_number_of_examples(directory, monkeypatch):
    with contextlib.suppress(RuntimeError):
        fail_in_the_callback(directory, monkeypatch)
    more = jax.tree.map(lambda x: np.append(x, x[:1], axis=0), ROWS)
    run(directory, more, trainer=make_trainer(num_examples=SIZE + 1))


def interrupt(directory, monkeypatch):
    def stop(rows):
        raise KeyboardInterrupt

    run(directory, Source(stop))


def lose_a_checkpoint(directory, monkeypatch):
    run(directory, stop_at=3)
    shutil.rmtree(directory / "checkpoints" / "3")
    run(directory)


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


def secrets():
    """What must not be found of the data: numbers as text and as bytes, and words."""
    found = {WORD.encode(), *(np.float32(x).tobytes() for x in NUMBERS)}
    return found | {str(np.float32(x))[:6].encode() for x in NUMBERS}


def places_of_secrets(content, words):
    places = {place for place, x in content.items() if any(s in x for s in secrets())}
    return places | places_of_keys(words, content)


ACTIONS = {
    succeed: None,
    meet_nan: None,
    meet_a_bad_record: "examples must be numbers",
    meet_another_shape: "same tree, shapes and dtypes",
    meet_too_few_rows: "one row for each index",
    fail_in_the_callback: "the callback failed",
    return_something_else: "must be a real scalar",
    fill_the_disk: "No space left on device",
    damage_a_checkpoint: "at least one checkpoint must be whole",
    change_the_number_of_examples: "must go on with the number of examples",
    interrupt: "",
    lose_a_checkpoint: None,
}


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
def test_nothing_shows_an_example_or_a_key(
    action, tmp_path, monkeypatch, capsys, caplog
):
    words = known_bits(monkeypatch)
    error, content = everything_shown(action, tmp_path, monkeypatch, capsys, caplog)
    assert (error is None) == (ACTIONS[action] is None)
    assert (ACTIONS[action] or "") in str(error)
    places = {"ledger.jsonl", "metrics.jsonl", "lock"}
    assert content.keys() >= places
    if action is succeed:
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
