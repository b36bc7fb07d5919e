"""From products to errors, from figures to verdicts and advice, and the command."""

import argparse
import contextlib
import dataclasses
import io
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dpmp import Policy, devices
from dpmp.tools import _timing
from dpmp.tools.devices import (
    DeviceReport,
    Row,
    _measure,
    _products,
    check_device_runs,
    measure_dtypes,
)
from dpmp.tools.devices._products import Kind

NAMES = [
    "float32",
    "float32 by default",
    "tf32",
    "bfloat16",
    "bfloat16 -> float32",
    "float16",
    "float16 -> float32",
    "float8_e4m3fn -> float32",
]
KINDS = {kind.name: kind for kind in _products.all_kinds()}
CPU = jax.devices()[0]


def run_command(*argv):
    """The exit status and what is printed."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    devices.add_devices_command(commands, file_type=pathlib.Path)
    args = parser.parse_args(["devices", *argv])
    with contextlib.redirect_stdout(io.StringIO()) as output:
        return args.command(args), output.getvalue()


def read_report(content):
    """The report that was written as JSON."""
    rows = [
        Row(**{**_without_verdict(row), "too_large": tuple(row["too_large"])})
        for row in content["rows"]
    ]
    names = [field.name for field in dataclasses.fields(DeviceReport)]
    values: dict[str, Any] = {name: content[name] for name in names}
    values["rows"] = tuple(rows)
    return DeviceReport(**values)


def _without_verdict(row):
    return {name: value for name, value in row.items() if name != "verdict"}


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Exit status, output and JSON of the whole command."""
    path = tmp_path_factory.mktemp("devices") / "report.json"
    status, output = run_command("--size", "64", "--json", str(path))
    return status, output, json.loads(path.read_text())


@pytest.fixture(scope="module")
def measured(command):
    return read_report(command[2])


@pytest.fixture
def three_kinds(monkeypatch):
    """Leaves out most of what would be measured."""
    kinds = [KINDS[name] for name in ("float32", "float16", "float16 -> float32")]
    monkeypatch.setattr(_products, "_KINDS", tuple(kinds))


@pytest.fixture
def refuse(monkeypatch):
    """Makes products of operands of some dtypes fail."""
    compile_product = _products.compile_product

    def refuse(*dtypes):
        def refusing(kind, *args):
            if kind.dtype in dtypes:
                raise RuntimeError(f"no {kind.dtype} here\nmore of it")
            return compile_product(kind, *args)

        monkeypatch.setattr(_products, "compile_product", refusing)
        _measure._run.cache_clear()

    yield refuse
    _measure._run.cache_clear()


def report(rows):
    """Of a device on which float32 takes a second, and tf32 does nothing."""
    given = {row.name: row for row in rows}
    defaults = [given.pop(name, ran(name)) for name in NAMES]
    return DeviceReport("A chip", "npu", 3, "1.2", 64, 5, (*defaults, *given.values()))


def ran(name, time_ratio=1.0, rounding_error=1e-7, sum_error=0.0, too_large=()):
    return Row(
        name, None, time_ratio, 2e9, time_ratio, rounding_error, sum_error, too_large
    )


def missing(name):
    return Row(name, error="TypeError: no such thing")


# What is measured.


def test_every_dtype_has_a_row_that_was_timed(measured):
    assert [row.name for row in measured.rows] == NAMES
    assert (measured.size, measured.rounds, measured.num_devices) == (64, 5, 8)
    assert (measured.platform, measured.jax_version) == ("cpu", jax.__version__)
    for row in measured.rows:
        assert row.error is None
        assert row.seconds
        assert row.operations_per_second == pytest.approx(2 * 64**3 / row.seconds)
        assert row.time_ratio
    assert measured.rows[0].time_ratio == 1


def test_cpus_sum_in_float32_and_have_no_tf32(measured):
    rows = {row.name: row for row in measured.rows}
    assert all(row.too_large == () for row in measured.rows)
    assert rows["tf32"].rounding_error == rows["float32"].rounding_error
    assert rows["tf32"].verdict == "emulated"
    assert rows["bfloat16 -> float32"].sum_error == 0
    assert rows["bfloat16"].sum_error > 0
    assert "Sums inside of products are in float32 or wider" in measured.advice[-1]


def test_float64_is_measured_in_64_bit_mode():
    with jax.enable_x64(True):
        kinds = _products.all_kinds()
        assert [kind.name for kind in kinds] == [*NAMES, "float64"]
        assert _products.rounding_error(kinds[-1], CPU) < 1e-15
        assert _products.sum_error(kinds[-1], CPU) == 0


def test_any_device_can_be_measured():
    last = jax.devices()[-1]
    shapes = ((2, 3), (3, 4))
    programs, errors = _products.compile_all(KINDS.values(), shapes, last)
    assert list(programs) == NAMES
    assert errors == {}
    for name, program in programs.items():
        assert program().devices() == {last}
        assert program().dtype == KINDS[name].result
    assert _products.run_tiny(KINDS["float16"], last).devices() == {last}


@pytest.mark.parametrize("name", NAMES)
def test_errors_are_those_of_the_dtype(name):
    kind = KINDS[name]
    roundoff = _products.roundoff(kind.dtype)
    error = _products.rounding_error(kind, CPU)
    assert roundoff / 16 < error <= kind.largest_rounding_error
    assert _products.sum_error(kind, CPU) <= kind.largest_sum_error


class _Narrow(Kind):
    """Adds up in the dtype of its operands."""

    def __call__(self, a, b, contraction=""):
        def add(total, terms):
            return total + terms[0][:, None] * terms[1], None

        start = jnp.zeros((a.shape[0], b.shape[1]), a.dtype)
        return jax.lax.scan(add, start, (a.T, b))[0].astype(self.result)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("result", ["float32", "itself"])
def test_narrow_sums_are_found(dtype, result):
    kind = _Narrow(dtype, dtype, dtype if result == "itself" else result)
    assert _products.sum_error(kind, CPU) > 10 * kind.largest_sum_error


class _Rounded(Kind):
    """Rounds operands to another dtype first."""

    def __call__(self, a, b, contraction=""):
        a, b = (x.astype(self.precision).astype(self.dtype) for x in (a, b))
        return a @ b


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_rounded_operands_are_found(precision):
    kind = _Rounded("float32", "float32", "float32", precision)
    error = _products.rounding_error(kind, CPU)
    assert error > 10 * kind.largest_rounding_error
    assert ran("tf32", rounding_error=error).verdict == "native"
    assert _products.sum_error(kind, CPU) == 0


def test_results_that_are_not_finite_are_no_results():
    class Overflowing(Kind):
        def __call__(self, a, b, contraction=""):
            return (a @ b) * jnp.float32(jnp.inf)

    kind = Overflowing("x", "float32", "float32")
    with pytest.raises(FloatingPointError, match="is not finite"):
        _products.sum_error(kind, CPU)


@pytest.mark.usefixtures("three_kinds")
def test_one_that_is_wrong_has_an_error_and_no_figures(monkeypatch):
    def sum_error(kind, device):
        if kind.name == "float16":
            raise FloatingPointError("not finite")
        return 0.0

    monkeypatch.setattr(_products, "sum_error", sum_error)
    float32, wrong, right = measure_dtypes(size=8, rounds=1).rows
    assert wrong == Row("float16", "FloatingPointError: not finite")
    assert float32.error is right.error is None
    assert right.sum_error == 0


def test_times_are_taken_in_turn_after_a_first_round():
    calls = []
    seconds = _timing.in_turn({x: lambda x=x: calls.append(x) for x in "ab"}, 2)
    assert calls == [*"ababab"]
    assert {name: len(times) for name, times in seconds.items()} == {"a": 2, "b": 2}


def test_ratios_are_taken_within_rounds():
    # The second round took five times as long for both.
    assert _timing.median_ratio([2, 15, 1], [1, 5, 1]) == 2


# Verdicts, advice and the table.


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (ran("bfloat16", 0.8), "native"),
        (ran("bfloat16", 0.81, 5e-3), "emulated"),
        (ran("float8_e4m3fn -> float32", 0.1), "native"),
        (ran("float32", 1.0), "native"),
        (ran("float32 by default", 1.0), "native"),
        (ran("tf32", 0.5, rounding_error=2.0**-19), "emulated"),
        (ran("tf32", 1.5, rounding_error=2.0**-12), "native"),
        (ran("float64", 2.9, 1e-16), "native"),
        (ran("float64", 3.1, 1e-16), "emulated"),
        (missing("float16"), "unavailable"),
    ],
    ids=lambda x: f"{x.name} {x.time_ratio}" if isinstance(x, Row) else x,
)
def test_verdicts(row, verdict):
    assert row.verdict == verdict


FAST = {"bfloat16": ran("bfloat16", 0.1), "float16": ran("float16", 0.1)}
TF32 = ran("tf32", 0.2, rounding_error=4e-4)


@pytest.mark.parametrize(
    ("rows", "policy"),
    [
        ([], "float32"),
        ([*FAST.values(), TF32], "mixed_bfloat16"),
        ([missing("bfloat16"), FAST["float16"], TF32], "mixed_float16"),
        ([missing("bfloat16"), missing("float16"), TF32], "tf32"),
        ([ran("tf32", 1.5, rounding_error=4e-4)], "float32"),
        ([ran("bfloat16 -> float32", 0.1)], "float32"),
        ([ran("bfloat16", 0.1, too_large=("sum_error",)), TF32], "tf32"),
    ],
    ids=[
        "nothing",
        "all",
        "no bfloat16",
        "no 16 bits",
        "slow",
        "float32 results",
        "wrong",
    ],
)
def test_the_policy_is_that_of_the_fastest_dtype_that_is_sound(rows, policy):
    found = report(rows)
    assert found.policy == policy
    assert f'from_name("{policy}")' in found.advice[0]
    assert Policy.from_name(policy)


@pytest.mark.parametrize(
    ("row", "texts"),
    [
        (ran("bfloat16", 1.25), ["take 1.25 of the time", "saves memory, not time."]),
        (ran("bfloat16", 0.25), ["take 0.25 of the time", "half the memory"]),
        (missing("bfloat16"), ["bfloat16: products do not run here."]),
        (ran("bfloat16 -> float32", 0.2), ["float32 result products take 0.20"]),
        (ran("float16"), ["needs a loss scale"]),
        (missing("float16"), ["float16: products do not run here."]),
        (ran("tf32"), ["no effect here"]),
        (missing("tf32"), ["tf32: products do not run here."]),
        (TF32, ["tf32: products take 0.20", "an error of 0.0004"]),
        (
            ran("float32 by default", rounding_error=4e-4),
            ["less here, with an error of 0.0004", "asks for all"],
        ),
        (ran("float8_e4m3fn -> float32"), ["emulated. The preset"]),
        (ran("float8_e4m3fn -> float32", 0.1), ["0.10 of the time of float32. The"]),
        (ran("float64", 2.0), ["float64: products take 2.00"]),
        (
            ran("float16", sum_error=0.1, too_large=("sum_error",)),
            ["Less precise than their dtype explains: float16."],
        ),
    ],
    ids=lambda x: x.name if isinstance(x, Row) else None,
)
def test_advice_follows_from_the_figures(row, texts):
    other = ran(row.name, 0.5) if row.time_ratio is None else missing(row.name)
    for text in texts:
        assert text in " ".join(report([row]).advice)
        assert text not in " ".join(report([other]).advice)


def test_full_float32_is_what_the_advice_says():
    policy = Policy(jnp.float32, jnp.float32, matmul_precision="float32")
    assert policy.matmul_precision == KINDS["float32"].precision


def test_the_table_has_every_row_and_the_errors():
    rows = [missing("float16"), ran("bfloat16", 0.25, 5e-3, 0.5, ("sum_error",))]
    found = report([*rows, ran("float64", 2.0)])
    lines = str(found).splitlines()
    assert lines[0] == "A chip (npu), number of devices: 3, jax 1.2"
    cells = [line.split("  ") for line in lines]
    table = {line[0]: [x.strip() for x in line[1:] if x] for line in cells}
    assert set(table) >= {*NAMES, "float64"}
    assert table["float16"] == ["unavailable", "-", "-", "-", "-"]
    assert table["bfloat16"] == ["native", "2.0", "0.25", "5.0e-03", "5.0e-01!"]
    assert "float16: TypeError: no such thing" in lines
    assert max(map(len, lines)) <= 80
    for sentence in found.advice:
        assert sentence in " ".join(lines)


# Devices that lack a dtype.


@pytest.mark.usefixtures("three_kinds")
def test_a_dtype_that_does_not_run_is_named_with_its_exception(refuse):
    refuse("float16")
    float32, *others = measure_dtypes(size=8, rounds=1).rows
    assert float32.verdict == "native"
    error = "RuntimeError: no float16 here"
    assert others == [Row("float16", error), Row("float16 -> float32", error)]


@pytest.mark.usefixtures("three_kinds")
def test_a_device_without_float32_is_refused(refuse):
    refuse("float32")
    with pytest.raises(ValueError, match="products of float32 must run on the device"):
        measure_dtypes(size=8, rounds=1)


@pytest.mark.parametrize("dtype", ["float32", jnp.bfloat16, jnp.float16], ids=str)
def test_dtypes_that_run_are_accepted(dtype):
    check_device_runs(dtype)
    check_device_runs(dtype, jax.devices()[3])


def test_a_dtype_that_does_not_run_is_refused(refuse):
    refuse("float16")
    match = (
        r"products of float16 must run on the device; got device='cpu \(cpu\)', "
        r"refusal='RuntimeError: no float16 here'\. Compute in another one"
    )
    with pytest.raises(ValueError, match=match):
        check_device_runs(jnp.float16)


def test_a_dtype_is_checked_once_for_each_kind_of_device(refuse, monkeypatch):
    refuse()
    runs = []
    monkeypatch.setattr(_products, "run_tiny", lambda *args: runs.append(args))
    for device in jax.devices():
        check_device_runs(jnp.bfloat16, device)
    check_device_runs("bfloat16")
    assert len(runs) == 1


def test_float64_needs_64_bit_mode():
    with pytest.raises(ValueError, match="float64 products need 64-bit mode"):
        check_device_runs(jnp.float64)
    with jax.enable_x64(True):
        check_device_runs(jnp.float64)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"device": "cpu"}, "device must be a jax device"),
        ({"size": 0}, "size must be an integer"),
        ({"rounds": 0}, "rounds must be an integer"),
    ],
    ids=["device", "size", "rounds"],
)
def test_what_cannot_be_measured_is_refused(options, match):
    with pytest.raises(ValueError, match=match):
        measure_dtypes(**{"size": 8, "rounds": 1, **options})


# The command.


def test_the_command_prints_what_it_writes(command, measured):
    status, output, content = command
    assert status == 0
    assert output == f"{measured}\n"
    assert content["policy"] == measured.policy
    assert content["advice"] == list(measured.advice)
    verdicts = [row["verdict"] for row in content["rows"]]
    assert verdicts == [row.verdict for row in measured.rows]


def test_reports_survive_json():
    found = report([missing("float16"), ran("tf32", 0.5, 1.0, 1.0, ("sum_error",))])
    assert read_report(json.loads(found.to_json())) == found


def test_without_a_file_the_command_only_prints(monkeypatch):
    found, sizes = report([]), []
    monkeypatch.setattr(
        _measure, "measure_dtypes", lambda *, size: sizes.append(size) or found
    )
    assert run_command() == (0, f"{found}\n")
    assert sizes == [None]
