"""Figures of the benchmarks: every one on a page is that of a line of results."""

import pathlib
import re

import pytest

from benchmarks import figures, needs, report
from benchmarks.markdown import read
from dpmp.numerics._grid import LARGEST_ROUNDING_SHARE

ROOT = pathlib.Path(__file__).parents[2]
PAGES = ["README.md", *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
_NUMBER = r"(\d[\d.,]*|one|two|three|four|five|six|seven|eight|nine|ten|twelve)"
_UNIT = r"(%|per cent|times|(milli)?seconds?|minutes?|hours?|(mega|giga)bytes|[MGT]B)"
_FIGURE = re.compile(rf"\b{_NUMBER} ?{_UNIT}(?!\w)")


def _words(text):
    """A text whose lines break nowhere."""
    return re.sub(r"\s+", " ", text)


def _prose(page):
    """A page without its blocks of code, except for their comments."""
    text = (ROOT / page).read_text()
    code = r"```(?:python|bash|sh|yaml)\n.*?```"
    return _words(re.sub(code, lambda m: "\n".join(_comments(m[0])), text, flags=re.S))


def _comments(code):
    return [line for line in code.splitlines() if "  # " in line]


def test_pages_are_made_from_lines_and_formulas():
    advice = "the lines or the tables changed: run `python -m benchmarks.report`"
    assert report.PAGE.read_text() == report.as_markdown(), advice
    assert report.PLAN.read_text() == report.plan(), advice


def test_figures_of_pages_are_those_of_the_lines_and_no_others():
    texts = {page: _prose(page) for page in PAGES}
    for x in figures.passages():
        passage = _words(x.text)
        assert passage in _prose(x.page), f"{x.page} should have {passage!r}"
        texts[x.page] = texts[x.page].replace(passage, "")
    unknown = [
        (page, text[max(0, m.start() - 40) : m.end()])
        for page, text in texts.items()
        for m in _FIGURE.finditer(text)
    ]
    assert not unknown, "add the passages of these pages to benchmarks/figures.toml"


def test_formulas_of_large_runs_are_those_of_compiled_programs():
    keys = ("devices", "parameters", "num_parameters")
    wanted = {"compiled_for": "virtual CPUs", "lora": None}
    lines = [x for x in read("scaling", *keys, **wanted) if x["devices"] > 1]
    assert {x["devices"] for x in lines} == {8, 64, 256}
    for line in lines:
        x = needs.checked(line)
        # Counters and keys of the state, and the layers' scales, are a few kilobytes.
        assert x["state"] == pytest.approx(x["bytes_of_state"], rel=1e-4, abs=2e4)
        assert x["moved"] == pytest.approx(x["bytes_of_collectives"], rel=1e-4)


@pytest.mark.parametrize("compiled_for", ["h100:1x8x8", "virtual CPUs"])
def test_adapters_of_the_largest_model_fit_on_64_devices(compiled_for):
    wanted = {"model": "70B", "layers": 80, "lora": 16, "model_axis": 8}
    (x,) = read("scaling", "compiled_for", compiled_for=compiled_for, **wanted)
    assert x["num_frozen"] == needs.MODELS[-1].num_parameters
    # Float32 factors and two averages, each divided by one of two axes of size 8.
    assert x["bytes_of_state"] == pytest.approx(12 * x["num_parameters"] / 8, rel=1e-4)
    # The scales of the norms are whole everywhere.
    frozen = 2 * x["num_frozen"] / x["devices"]
    assert x["bytes_of_frozen_model"] == pytest.approx(frozen, rel=0.01)
    sizes = ("bytes_of_state", "bytes_of_frozen_model", "bytes_of_temporaries")
    assert sum(x[name] for name in sizes) < 80e9
    # Devices with different examples exchange integers only.
    assert any(name.startswith("reduce-scatter s32") for name in x["collectives"])
    assert not any("reduce-scatter f" in name for name in x["collectives"])
    assert not any("reduce-scatter bf" in name for name in x["collectives"])


def test_the_largest_model_with_proved_sums_is_as_the_guide_says():
    assert "end at about 700 billion parameters" in _prose("docs/past_one_machine.md")
    assert needs.rounding_share(700 * 10**9) < LARGEST_ROUNDING_SHARE
    with pytest.raises(ValueError, match="must cost at most 5%"):
        needs.rounding_share(710 * 10**9)
