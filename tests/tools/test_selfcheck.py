"""The command: what it prints, writes and returns."""

import dataclasses
import json
import math
import subprocess
import sys

import jax
import numpy as np
import pytest
from subjects import SIZES, sum_in_float64, sums

from dpmp import __main__
from dpmp.tools.selfcheck import command
from dpmp.tools.selfcheck._noise import measure_keys
from dpmp.tools.selfcheck._subjects import Subjects
from dpmp.tools.selfcheck._sums import measure_contributions

BROKEN = sums(lambda *_: [np.full((1, 1), math.inf)])
GOOD = sums(sum_in_float64)
NOT_OURS = dataclasses.replace(BROKEN, name="theirs", is_claimed=False)


@pytest.fixture
def selfcheck(monkeypatch, capsys):
    """Runs the command with other subjects; gives exit status and output."""

    def run(subjects, *args):
        monkeypatch.setattr(command, "Sizes", lambda: SIZES)
        monkeypatch.setattr(command, "dpmp_subjects", lambda **_: subjects)
        status = __main__.main(["selfcheck", *args])
        return status, capsys.readouterr().out

    return run


def test_the_exit_status_is_0_if_all_claims_hold(selfcheck):
    status, output = selfcheck(Subjects(sums=(GOOD, NOT_OURS), remarks=("A remark.",)))
    assert status == 0
    assert "All 3 claims of dpmp hold here." in output
    assert "A remark." in output
    assert "FAIL" not in output
    assert "theirs (no claim)" in output
    assert "fails" in output
    assert output.rstrip().endswith("All 3 claims of dpmp hold here.")


def test_the_exit_status_is_1_if_a_claim_is_broken(selfcheck):
    status, output = selfcheck(Subjects(sums=(GOOD, BROKEN)))
    assert status == 1
    assert "2 of 6 claims of dpmp FAIL here: broken." in output


def test_results_are_written_as_json(selfcheck, tmp_path):
    path = tmp_path / "results.json"
    selfcheck(Subjects(sums=(GOOD, NOT_OURS)), "--json", str(path))
    content = json.loads(path.read_text())
    assert set(content) == {"device", "python", "versions", "results"}
    assert {"dpmp", "jax"} <= set(content["versions"])
    largest, smallest, infinite, *_ = content["results"]
    assert largest["passed"] is smallest["passed"] is True
    assert largest["value"] == pytest.approx(1, rel=1e-3)
    assert (infinite["subject"], infinite["value"]) == ("theirs", "inf")
    assert infinite["passed"] is infinite["is_claimed"] is False


def test_a_file_in_no_directory_is_refused_before_anything_is_measured(capsys):
    with pytest.raises(SystemExit):
        __main__.main(["selfcheck", "--json", "/no/such/directory/file"])
    assert "there is no directory" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_command(tmp_path):
    path = tmp_path / "results.json"
    command = ["selfcheck", "--include-unsafe", "--json", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "dpmp", *command], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(path.read_text())["results"]
    assert all(x["passed"] for x in results if x["is_claimed"])
    unsafe = [x for x in results if x["subject"] == "dpmp continuous (unsafe)"]
    assert [x["passed"] for x in unsafe[:2]] == [False, False]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:optax.global_norm:DeprecationWarning")
def test_jax_privacy_is_measured_and_fails():
    pytest.importorskip("jax_privacy")
    from benchmarks import selfcheck_others

    with jax.numpy_dtype_promotion("standard"):
        subjects = selfcheck_others.all_subjects()
        (default,) = (x for x in subjects.sums if x.name == "jax_privacy default")
        largest, _ = measure_contributions(default, SIZES)
        (keys,) = (x for x in subjects.keys if x.name == "jax_privacy")
        assert measure_keys(keys)[0].value < 32
    assert not largest.is_claimed
    assert largest.value > 2
