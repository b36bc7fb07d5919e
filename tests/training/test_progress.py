import io
import itertools
import re

import pytest
import rich.console

from dpmp.training import _progress
from dpmp.training._progress import Progress


def describe_steps(step):
    """Steps in place of epsilons, to see which are quoted."""
    return f"spent {step}"


class Run:
    """Reports on a run, written to a string, with a clock that ticks 2 s a step."""

    def __init__(self, monkeypatch, *, is_terminal=False, **options):
        clock = itertools.count(100.0, 2.0)
        monkeypatch.setattr(_progress.time, "monotonic", lambda: next(clock))
        self.file = io.StringIO()
        console = rich.console.Console(
            file=self.file, force_terminal=is_terminal, width=200
        )
        options = {"start": 0, "stop": 100, **options}
        self.steps = range(options["start"] + 1, options["stop"] + 1)
        self.progress = Progress(
            examples_per_step=32,
            describe_privacy=options.pop("describe_privacy", describe_steps),
            console=console,
            **options,
        )

    def lines(self):
        with self.progress:
            for step in self.steps:
                self.progress.update(step)
        return self.file.getvalue().splitlines()


@pytest.fixture
def make_run(monkeypatch):
    return lambda **options: Run(monkeypatch, **options)


def test_plain_lines_are_written_now_and_then(make_run):
    run = make_run()
    lines = run.lines()
    assert [step for step in run.steps if run.progress.is_due(step)] == [
        *range(10, 101, 10)
    ]
    assert [line.split(",")[0] for line in lines] == [
        f"step {step}/100" for step in range(10, 101, 10)
    ]
    assert all("\x1b" not in line for line in lines)


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 1), (0, 17), (5, 104), (0, 1999), (990, 1000)]
)
def test_about_ten_lines_are_written_and_the_last_step_is_among_them(
    make_run, start, stop
):
    lines = make_run(start=start, stop=stop).lines()
    assert min(10, stop - start) <= len(lines) <= 20
    assert lines[-1].startswith(f"step {stop}/{stop}, spent {stop}")


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize(("start", "stop"), [(3, 50), (0, 7), (10, 1234)])
def test_never_less_is_quoted_than_is_spent(make_run, start, stop, is_terminal):
    quoted = {}
    run = make_run(start=start, stop=stop, is_terminal=is_terminal)
    describe = run.progress._describe
    for step in run.steps:
        quoted[step] = int(re.search(r"spent (\d+)", describe(step, {}))[1])
    assert all(step <= covered <= stop for step, covered in quoted.items())
    assert quoted[stop] == stop


def test_what_is_spent_is_computed_for_few_steps(make_run):
    asked = set()

    def describe_privacy(step):
        asked.add(step)
        return ""

    make_run(stop=1000, is_terminal=True, describe_privacy=describe_privacy).lines()
    assert len(asked) == 10


def test_a_bar_is_drawn_on_a_terminal(make_run):
    run = make_run(is_terminal=True)
    assert all(run.progress.is_due(step) for step in run.steps)
    text = "".join(run.lines())
    assert "\x1b" in text
    assert "step 100/100" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_narrow_terminal_shows_everything(monkeypatch, width):
    run = Run(monkeypatch, is_terminal=True, stop=4)
    run.progress._console.width = width
    with run.progress:
        for step in run.steps:
            run.progress.update(step, {"loss": 2.5, "overflowed": 0.25}, {"top-1": 0.5})
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|[━╸╺\s]", "", run.file.getvalue())
    last = "step4/4,spent4,noisyloss2.5,noisyoverflowed0.25,publictop-10.5,"
    assert re.search(rf"{last}[\d.]+examples/s,0:00:00left$", text)


def test_on_a_terminal_the_device_is_looked_at_twice_a_second(monkeypatch):
    run = Run(monkeypatch, is_terminal=True, stop=1000)
    clock = itertools.count(0.0, 0.001)
    monkeypatch.setattr(_progress.time, "monotonic", lambda: next(clock))
    with run.progress:
        looks = 0
        for step in run.steps:
            looks += run.progress.is_due(step)
            run.progress.update(step)
    num_reports, seconds = len(run.progress.report_steps), next(clock)
    assert num_reports < looks <= num_reports + seconds / 0.5 + 1


def test_public_numbers_are_shown_until_there_are_new_ones(make_run):
    progress = make_run().progress
    progress.update(5, {}, {"accuracy": 0.5})
    assert "accuracy 0.5" in progress._describe(10, {"loss": 2.0})
    progress.update(15, {}, {"accuracy": 0.75})
    assert "noisy loss 2, public accuracy 0.75" in progress._describe(20, {"loss": 2.0})


@pytest.mark.parametrize(
    ("start", "line"),
    [(0, "steps 1 to 100 done in"), (40, "steps 41 to 100"), (100, "no more steps")],
)
def test_the_last_line_has_steps_time_and_what_is_added(make_run, start, line):
    run = make_run(start=start)
    run.lines()
    run.progress.end(", epsilon 1 at delta 1e-5")
    last = run.file.getvalue().splitlines()[-1]
    assert last.startswith(f"dpmp: {line}")
    assert re.search(r" done in 0:0\d:\d\d, epsilon 1 at delta 1e-5$", last)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_disabled_it_prints_nothing(make_run, is_terminal):
    run = make_run(is_terminal=is_terminal, enabled=False)
    assert not any(run.progress.is_due(step) for step in run.steps)
    run.lines()
    run.progress.end("")
    assert run.file.getvalue() == ""


def test_speed_and_time_left_do_not_count_the_first_step(make_run):
    # The clock ticks once for the first step and once for each line: after k lines,
    # 2k seconds and 10k - 1 steps.
    lines = make_run().lines()
    assert lines[0] == "step 10/100, spent 10, 144.0 examples/s, 0:00:20 left"
    assert lines[-1] == "step 100/100, spent 100, 158.4 examples/s, 0:00:00 left"
    # A continued run has the speed of its own steps, and one step has none.
    lines = make_run(start=900, stop=1000).lines()
    assert lines[0].startswith("step 910/1000, spent 910, 144.0 examples/s")
    assert make_run(stop=1).lines() == ["step 1/1, spent 1"]


def test_the_bar_is_stopped_after_an_error(make_run):
    run = make_run(is_terminal=True)
    with pytest.raises(RuntimeError, match="data"), run.progress:
        raise RuntimeError("data")
    assert not run.progress._bar.live.is_started


def test_it_goes_to_standard_error_by_default(capsys):
    with Progress(
        start=0, stop=1, examples_per_step=1, describe_privacy=describe_steps
    ) as progress:
        progress.update(1)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "step 1/1, spent 1\n"
