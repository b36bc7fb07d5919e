"""The pictures were looked at; here is what must be in them."""

import sys

import numpy as np
import pytest

from dpmp.__main__ import main
from dpmp.runs._metrics import MetricsFile
from dpmp.tools.plot import draw


@pytest.fixture
def directory(tmp_path):
    lines = [
        {"step": x, "seconds": 1.0 * x, "noisy/loss": 1 / x, "epsilon": x / 9}
        | ({"public/loss": 2 / x} if x % 5 == 0 else {})
        for x in range(1, 11)
    ]
    MetricsFile(tmp_path, lines, 10)
    return tmp_path


def test_each_metric_has_a_panel_and_shares_it_with_public_numbers(directory):
    pytest.importorskip("matplotlib.figure")
    axes = {x.get_ylabel(): x for x in draw(directory).axes}
    assert {*axes} == {"loss", "epsilon"}
    noisy, public = (line.get_xydata() for line in axes["loss"].lines)
    np.testing.assert_allclose(noisy[:, 1], 1 / np.arange(1, 11))
    np.testing.assert_allclose(public, [[5, 0.4], [10, 0.2]])
    (line,) = axes["epsilon"].lines
    np.testing.assert_array_equal(line.get_ydata(), np.arange(1, 11) / 9)


def test_the_command_writes_a_picture_or_says_why_not(directory, refusal, monkeypatch):
    pytest.importorskip("matplotlib.figure")
    assert main(["plot", str(directory)]) == 0
    assert (directory / "plot.png").stat().st_size > 10_000
    for output in (directory / "missing" / "plot.png", "plot.doc", "plot"):
        said = refusal("plot", directory, "--output", output)
        assert "must be written" in said
    (directory / "empty").mkdir()
    assert "must have metrics of a run" in refusal("plot", directory / "empty")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install matplotlib" in refusal("plot", directory)
