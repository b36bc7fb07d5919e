"""The pictures were looked at; here is what must be in them."""

import sys

import numpy as np
import pytest

from dpmp.__main__ import main
from dpmp.runs._metrics import MetricsFile
from dpmp.tools.plot import draw

LABELS = {
    "loss": "loss",
    "clipped": "clipped,\nfraction of examples",
    "scale": "loss scale",
    "epsilon": "epsilon",
}


def write(directory, steps, make_values):
    lines = [{"step": x, "seconds": 1.0 * x, **make_values(x)} for x in steps]
    MetricsFile(directory, lines, max(steps))


def values_of(step):
    values = {"noisy/loss": 1 / step, "noisy/clipped": 0.5, "loss_scale": 2.0**step}
    return values | ({"public/loss": 2 / step} if step % 5 == 0 else {})


def panels(directory):
    """The axes of a picture by their labels."""
    pytest.importorskip("matplotlib.figure")
    return {x.get_ylabel(): x for x in draw(directory).axes}


def test_each_metric_has_a_panel_and_shares_it_with_public_numbers(tmp_path):
    write(tmp_path, range(1, 11), lambda x: {**values_of(x), "epsilon": x / 9})
    axes = panels(tmp_path)
    assert {*axes} == {*LABELS.values()}
    noisy, public = (line.get_xydata() for line in axes["loss"].lines)
    np.testing.assert_allclose(noisy[:, 1], 1 / np.arange(1, 11))
    np.testing.assert_allclose(public, [[5, 0.4], [10, 0.2]])
    (line,) = axes["epsilon"].lines
    np.testing.assert_array_equal(line.get_ydata(), np.arange(1, 11) / 9)


def refusal(capsys, *args):
    with pytest.raises(SystemExit) as error:
        main(["plot", *map(str, args)])
    assert error.value.code == 2
    return capsys.readouterr().err


def test_the_command_writes_a_png_and_names_it(tmp_path, capsys):
    pytest.importorskip("matplotlib.figure")
    write(tmp_path, [1, 2], values_of)
    assert main(["plot", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'plot.png'}\n"
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    for output in (tmp_path / "missing" / "plot.png", "plot.doc", "plot"):
        assert "must be written" in refusal(capsys, tmp_path, "--output", output)


def test_a_directory_without_metrics_is_refused(tmp_path, capsys):
    assert "must have metrics of a run" in refusal(capsys, tmp_path)


def test_a_missing_matplotlib_is_told(tmp_path, capsys, monkeypatch):
    write(tmp_path, [1], values_of)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install matplotlib" in refusal(capsys, tmp_path)
