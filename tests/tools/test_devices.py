"""From products to errors, and from measurements to verdicts, policy and advice."""

import jax
import jax.numpy as jnp
import pytest

from dpmp import Policy, _timing
from dpmp.tools import devices
from dpmp.tools.devices import DeviceReport, Kind, Row, measure_dtypes

KINDS = {kind.name: kind for kind in devices.KINDS}


def ran(name, time_ratio=1.0, rounding_error=1e-3, adds_in_float32=True):
    return Row(name, None, 2e9, time_ratio, rounding_error, adds_in_float32)


def missing(name):
    return Row(name, error="TypeError: no such thing")


def report(*rows):
    """A report of a device on which the other products are those of float32."""
    given = {row.name: row for row in rows}
    default = {name: ran(name, rounding_error=1e-7) for name in KINDS}
    return DeviceReport("A chip", "npu", 64, tuple({**default, **given}.values()))


def test_cpus_run_all_products_and_add_in_float32():
    measured = measure_dtypes(size=16)
    assert [row.name for row in measured.rows] == list(KINDS)
    assert (measured.size, measured.platform) == (16, "cpu")
    assert measured.rows[0].time_ratio == 1
    # The first three are "float32", "float32 by default" and "tf32".
    assert [row.verdict for row in measured.rows[:3]] == ["float32"] * 3
    for row in measured.rows:
        assert row.operations_per_second
        assert row.adds_in_float32
        dtype = KINDS[row.name].dtype
        eps = float(jnp.finfo(dtype).eps)
        assert dtype == "float32" or eps / 32 < row.rounding_error <= 2 * eps


def test_programs_run_on_the_default_device():
    last = jax.devices()[-1]
    with jax.default_device(last):
        programs, errors = devices.compile_all(KINDS.values(), ((2, 3), (3, 4)))
    assert errors == {}
    for name, program in programs.items():
        assert program().devices() == {last}
        assert program().dtype == KINDS[name].result


class _Narrow(Kind):
    """Adds in the dtype of the operands."""

    def __call__(self, a, b):
        def add(total, terms):
            return total + terms[0][:, None] * terms[1], None

        start = jnp.zeros((a.shape[0], b.shape[1]), a.dtype)
        return jax.lax.scan(add, start, (a.T, b))[0].astype(self.result)


class _Rounded(Kind):
    """Rounds the operands first, as TF32 products do."""

    def __call__(self, a, b):
        return jax.lax.reduce_precision(a, 8, 10) @ jax.lax.reduce_precision(b, 8, 10)


class _Overflowing(Kind):
    def __call__(self, a, b):
        return (a @ b) * jnp.float32(jnp.inf)


def test_narrow_sums_and_rounded_operands_are_found(monkeypatch):
    rounded = _Rounded("tf32", "float32", "float32")
    assert ran("tf32", 0.5, devices.rounding_error(rounded)).verdict == "native"
    monkeypatch.setattr(devices, "_SIDE", 16)  # is enough to find narrow sums
    assert devices.adds_in_float32(rounded)
    narrow = _Narrow("float16", "float16", "float32")
    for kind in (narrow, _Overflowing("x", "float32", "float32")):
        assert not devices.adds_in_float32(kind)


def test_times_are_taken_in_turn_and_compared_within_rounds():
    calls = []
    seconds = _timing.in_turn({x: lambda x=x: calls.append(x) for x in "ab"}, 2)
    assert calls == [*"ababab"]
    # The first round does not count.
    assert {name: len(times) for name, times in seconds.items()} == {"a": 2, "b": 2}
    # The second round took five times as long for both.
    assert _timing.median_ratio([2, 15, 1], [1, 5, 1]) == 2


class _Missing(Kind):
    """A product that does not run."""

    def __call__(self, a, b):
        raise RuntimeError(f"no {self.dtype} here\nmore of it")


def test_a_dtype_that_does_not_run_is_named_with_its_exception(monkeypatch):
    kinds = KINDS["float32"], _Missing(*KINDS["float16"])
    monkeypatch.setattr(devices, "KINDS", kinds)
    float32, float16 = measure_dtypes(size=8).rows
    assert float32.verdict == "float32"
    assert float16 == Row("float16", "RuntimeError: no float16 here")
    assert float16.verdict == "unavailable"
    monkeypatch.setattr(devices, "KINDS", (_Missing(*KINDS["float32"]),))
    with pytest.raises(ValueError, match="products of float32 must run on the device"):
        measure_dtypes(size=8)


def test_verdicts_follow_from_time_and_errors():
    assert ran("bfloat16", 0.8).verdict == "native"
    assert ran("bfloat16", 0.81).verdict == "emulated"
    assert ran("tf32", 0.5, rounding_error=2.0**-19).verdict == "float32"
    assert ran("float16", 0.5, adds_in_float32=False).verdict == "imprecise"


FAST = [ran("bfloat16", 0.1), ran("float16", 0.1), ran("tf32", 0.2)]


@pytest.mark.parametrize(
    ("rows", "policy"),
    [
        ([], "float32"),
        (FAST, "mixed_bfloat16"),
        ([missing("bfloat16"), *FAST[1:]], "mixed_float16"),
        ([missing("bfloat16"), missing("float16"), FAST[2]], "tf32"),
        ([ran("tf32", 1.5)], "float32"),
        ([ran("bfloat16 -> float32", 0.1)], "float32"),
        ([ran("bfloat16", 0.1, adds_in_float32=False), FAST[2]], "tf32"),
    ],
)
def test_the_policy_is_the_first_whose_products_are_faster_and_sound(rows, policy):
    found = report(*rows)
    assert found.policy == policy
    assert f'from_name("{policy}")' in found.advice[0]
    assert Policy.from_name(policy)
