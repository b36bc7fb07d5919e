"""What a run shows: never less than is spent, and at a small part of its time."""

import io
import itertools
import re

import pytest
import rich.console

from dpmp import DPSGD
from dpmp.training import _report
from dpmp.training._report import Report, SpentPrivacy


def make_mechanism(**fields):
    options = {"noise_multiplier": 1.37, "delta": 1e-5, **fields}
    return DPSGD(
        num_examples=100,
        expected_batch_size=32,
        iterations=2000,
        l2_clip_norm=1.0,
        **options,
    )


MECHANISM = make_mechanism()


class Run:
    """Reports on a run, written to a string, with a clock that ticks 2 s a step.

    Epsilon is the number of steps, to see which are quoted.
    """

    def __init__(self, monkeypatch, *, is_terminal=False, width=200, **options):
        self.file = io.StringIO()
        console = rich.console.Console(
            file=self.file, force_terminal=is_terminal, width=width
        )
        options = {"start": 0, "stop": 100, "mechanism": MECHANISM} | options
        self.steps = range(options["start"] + 1, options["stop"] + 1)
        self.progress = Report(console=console, **{"epsilon": float} | options)
        set_clock(monkeypatch, itertools.repeat(2.0))

    def update(self, step, metrics=None, public=None):
        self.progress.show(step, 0, metrics or {}, public or {})

    def lines(self, *values):
        with self.progress:
            for step in self.steps:
                self.update(step, *values)
        return self.file.getvalue().splitlines()[1:]


def set_clock(monkeypatch, ticks):
    """Every look at the clock takes the next number of seconds."""
    times = itertools.accumulate(ticks)
    monkeypatch.setattr(_report.time, "monotonic", lambda: next(times))


@pytest.fixture
def make_run(monkeypatch):
    return lambda **options: Run(monkeypatch, **options)


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 1), (0, 100), (5, 104), (0, 1999), (990, 1000)]
)
def test_about_ten_lines_are_written_and_the_last_step_is_among_them(
    make_run, start, stop
):
    lines = make_run(start=start, stop=stop).lines()
    assert min(10, stop - start) <= len(lines) <= 20
    assert lines[-1].startswith(f"step {stop}/{stop}, epsilon {stop}.000 of {stop}.000")
    assert all("\x1b" not in line for line in lines)


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize(("start", "stop"), [(3, 50), (0, 7), (10, 1234)])
def test_never_less_is_quoted_than_is_spent(make_run, start, stop, is_terminal):
    quoted = {}
    run = make_run(start=start, stop=stop, is_terminal=is_terminal)
    for step in run.steps:
        text = run.progress._describe(step)
        quoted[step] = float(re.search(r"epsilon (?:below )?(\d+\.\d+)", text)[1])
    assert all(step <= covered <= stop for step, covered in quoted.items())
    assert quoted[stop] == stop


def test_what_is_spent_is_computed_for_few_steps(make_run):
    asked = []

    def epsilon(step):
        asked.append(step)
        return float(step)

    make_run(stop=1000, is_terminal=True, epsilon=epsilon).lines()
    assert len({*asked}) == len(asked) <= 10


class Value:
    """A number on a device, which knows how often it was looked at."""

    def __init__(self):
        self.looks = 0

    def __float__(self):
        self.looks += 1
        return 0.5


def test_on_a_terminal_the_device_is_looked_at_twice_a_second(make_run, monkeypatch):
    run, value = make_run(is_terminal=True, stop=1000), Value()
    set_clock(monkeypatch, itertools.repeat(0.001))
    run.lines({"loss": value})
    num_reports, seconds = len(run.progress.report_steps), _report.time.monotonic()
    assert num_reports < value.looks <= num_reports + seconds / 0.5 + 1


@pytest.mark.parametrize(("enabled", "looks"), [(True, 10), (False, 0)])
def test_elsewhere_the_device_is_looked_at_for_a_line(make_run, enabled, looks):
    run, value = make_run(enabled=enabled), Value()
    run.lines({"loss": value})
    run.progress.end()
    assert value.looks == looks
    assert bool(run.file.getvalue()) == enabled


def test_numbers_are_shown_until_there_are_new_ones(make_run):
    """With a directory, noisy metrics arrive with the checkpoints."""
    run = make_run()
    run.update(5, {}, {"accuracy": 0.5})
    run.update(10, {"loss": 2.0})
    run.update(20)
    run.update(25, {}, {"accuracy": 0.75})
    run.update(30)
    lines = run.file.getvalue().splitlines()
    for line, accuracy in zip(lines, ("0.5", "0.5", "0.75"), strict=True):
        assert f"public accuracy {accuracy}, noisy loss 2" in line


@pytest.mark.parametrize(
    ("start", "line"),
    [(0, "steps 1 to 100 done in"), (40, "steps 41 to 100"), (100, "no more steps")],
)
def test_the_last_line_has_epsilon_and_delta(make_run, start, line):
    run = make_run(start=start, first_line=lambda: "what runs")
    run.lines()
    run.progress.end(", saved in /there")
    first, *_, last = run.file.getvalue().splitlines()
    assert first == "what runs"
    assert last.startswith(f"dpmp: {line}")
    assert last.endswith(", epsilon 100.000 at delta 1e-05, saved in /there")


def test_it_goes_to_standard_error_by_default(capsys):
    with Report(MECHANISM, float, 0, 1) as progress:
        progress.show(1, 0, {}, {})
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "\nstep 1/1, epsilon 1.000 of 1.000\n"


def test_metrics_without_noise_are_called_exact(make_run):
    run = make_run(mechanism=MECHANISM.without_privacy(), stop=1)
    run.update(1, {"loss": 2.0})
    assert run.file.getvalue() == "step 1/1, no privacy, exact loss 2\n"


# What is spent.


def spent_by(mechanism):
    return SpentPrivacy(mechanism, 6, lambda step: mechanism.guarantee(step).epsilon)


@pytest.mark.parametrize("noise_multiplier", [0.7, 1.37, 3.3])
def test_no_less_epsilon_is_quoted_than_is_spent(noise_multiplier, monkeypatch):
    set_clock(monkeypatch, itertools.chain([0, 1, 1e6], itertools.repeat(1)))
    mechanism = make_mechanism(noise_multiplier=noise_multiplier)
    spent = spent_by(mechanism)
    _, at_three, _, final = spent.describe(3).split(" ")
    _, at_end, *_, delta = spent.describe_end().split(" ")
    for quoted, step in ((at_three, 3), (final, 6), (at_end, 6)):
        epsilon = mechanism.guarantee(step).epsilon
        assert epsilon <= float(quoted) < epsilon + 0.01
    assert float(delta) == mechanism.delta


def test_epsilon_is_left_out_where_computing_it_takes_too_much_of_the_run(monkeypatch):
    # The final epsilon takes 1 s. Steps begin at once, and take 1 s each.
    set_clock(monkeypatch, itertools.chain([0, 1, 0], itertools.repeat(1)))
    spent = spent_by(MECHANISM)
    final = spent.describe(6).split(" of ")[1]
    for _ in range(75):
        assert spent.describe(3) == f"epsilon below {final}"
        assert spent.epsilon(3) is None
    assert spent.epsilon(6) == MECHANISM.guarantee(6).epsilon
    # After 200 s, two times 1 s is one per cent.
    for _ in range(100):
        spent.describe(3)
    assert spent.describe(3).endswith(f" of {final}")


def test_without_noise_or_delta_there_is_no_epsilon():
    public = spent_by(MECHANISM.without_privacy())
    assert public.describe(3) == public.describe_end() == "no privacy"
    spent = spent_by(make_mechanism(delta=None))
    assert spent.describe(3) == "epsilon not shown without a delta"
    assert spent.epsilon(6) is None
