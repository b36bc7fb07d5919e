"""The code in the README and in the guides runs as it stands."""

import ast
import dataclasses
import os
import pathlib
import re

import jax
import pytest

import dpmp
from dpmp.numerics import _float_sums
from dpmp.numerics._arithmetic import parse_arithmetic

os.environ.setdefault("KERAS_BACKEND", "jax")

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WITH_CODE = [page for page in PAGES if "```python" in page.read_text()]
# They compile for seconds, so that only the slow tests run them.
LONG = {"audit", "data", "from_jax_privacy", "from_opacus", "less_noise", "long_runs"}
LONG |= {"lora", "many_devices", "precision", "recipes", "tunix"}
SEARCHES = {"less_noise"}  # in so many ways that it takes half a minute


def blocks(page):
    """The code of a page, each block with empty lines before it up to its place."""
    text = page.read_text()
    for block in re.finditer(r"```python\n(.*?)```", text, re.S):
        yield "\n" * (text[: block.start(1)].count("\n")) + block.group(1)


def with_noise(mechanism, *, epsilon, delta):
    """Takes the place of `calibrate`, which searches."""
    return dataclasses.replace(mechanism, noise_multiplier=1.5, delta=delta)


def search_with_noise(search, **target):
    """Takes the place of `calibrate` of a search among runs."""
    mechanism = with_noise(search.mechanism, **target)
    return dataclasses.replace(search, mechanism=mechanism)


@pytest.mark.parametrize(
    ("page", "as_it_stands"),
    [
        *(pytest.param(x, False, id=x.stem) for x in WITH_CODE if x.stem not in LONG),
        *(
            pytest.param(
                x, x.stem not in SEARCHES, id=f"{x.stem}-slow", marks=pytest.mark.slow
            )
            for x in WITH_CODE
        ),
    ],
)
@pytest.mark.filterwarnings("default")  # those of other packages
def test_code_of_a_page_runs(page, as_it_stands, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # a run would go on in the directory of an older one
    if page.stem == "tunix":
        pytest.importorskip("tunix", reason="pip install '.[tunix]'")
    namespace = {"__name__": page.stem}
    if not as_it_stands:
        monkeypatch.setattr(dpmp.DPSGD, "calibrate", with_noise)
        monkeypatch.setattr(dpmp.planning.BestOfRuns, "calibrate", search_with_noise)
    with jax.numpy_dtype_promotion("standard"):  # as users have it
        for block in blocks(page):
            exec(compile(block, str(page), "exec"), namespace)
    if keras := namespace.get("keras"):  # the page has set its policy for all models
        keras.config.set_dtype_policy("float32")


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_links_to_files_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!http|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), (page, target)


def test_no_line_break_ends_a_formula():
    broken = []
    for page in PAGES:
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.S)
        for paragraph in re.split(r"\n\s*\n", text):
            # A new line may begin an item of a list, but not within a formula.
            items = re.finditer(r"\n *[-+*] ", paragraph)
            odd = [x for x in items if paragraph[: x.start()].count("$") % 2]
            # A formula of its own begins a paragraph.
            if odd or re.search(r"\n *\$\$", paragraph) or paragraph.count("$") % 2:
                broken.append((page.name, paragraph[:60]))
    assert not broken


def test_messages_of_the_guide_are_those_of_the_code():
    texts = [
        node.value
        for path in (ROOT / "dpmp").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `(.*?)` \|", page, re.M)
    assert len(quoted) > 10
    assert [x for x in quoted if not any(x in text for text in texts)] == []


def test_the_largest_batches_of_float_sums_are_as_the_guide_says():
    text = (ROOT / "docs" / "guarantees.md").read_text()
    table = re.search(r"\| `arithmetic=` .*?\n\n", text, re.S).group()
    for row in table.splitlines()[2:-1]:
        name, share, *quoted = re.findall(r"[\w.%]+", row)
        arithmetic = parse_arithmetic(name)
        assert share == f"{100 * arithmetic.rounding_reserve:.2g}%"
        for microbatch_size, size in zip((None, 64, 16, 1), quoted, strict=True):
            assert int(size) == largest_batch(arithmetic, microbatch_size)


def largest_batch(arithmetic, microbatch_size):
    sizes = (2**k for k in range(25) if 2**k >= (microbatch_size or 1))
    return max(
        size
        for size in sizes
        if _float_sums.reserve_needed(arithmetic, size, microbatch_size or size)
        <= arithmetic.rounding_reserve
    )
