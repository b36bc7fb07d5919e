"""What users see: names, documentation that is true, and who imports whom."""

import ast
import doctest
import importlib
import pathlib
import pkgutil
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpmp
from dpmp import _accumulation

ROOT = pathlib.Path(dpmp.__file__).parent
README = pathlib.Path(__file__).parent.parent / "README.md"
MODULES = sorted(m.name for m in pkgutil.walk_packages([str(ROOT)], "dpmp."))

# From the README: each module imports only from rows after its own.
ROWS = [
    line.split()
    for line in re.search(r"```\n(__main__\n.*?)```", README.read_text(), re.S)
    .group(1)
    .splitlines()
]


@pytest.mark.parametrize("name", MODULES)
def test_doctests_are_true(name):
    names = {"jax": jax, "jnp": jnp, "np": np, "optax": optax}
    module = importlib.import_module(name)
    failures, _ = doctest.testmod(module, extraglobs={**names, **vars(dpmp)})
    assert failures == 0


def test_readme_code_runs_as_it_stands():
    namespace = {}
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam needs it
        for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.S):
            exec(compile(block, str(README), "exec"), namespace)
    assert namespace["noisy_grads"]["w"].dtype == jnp.float32


def test_readme_quotes_the_largest_batches():
    table = re.search(r"\| `accumulator=` .*?\n\n", README.read_text(), re.S).group()
    for row in table.splitlines()[2:-1]:
        name, share, *quoted = re.findall(r"[\w.%]+", row)
        accumulator = _accumulation.get_accumulator(name)
        assert share == f"{100 * accumulator.slack:.2g}%"
        for microbatch_size, size in zip((None, 64, 16, 1), quoted, strict=True):
            assert int(size) == _largest_batch(accumulator, microbatch_size)


def _largest_batch(accumulator, microbatch_size):
    sizes = (2**k for k in range(25) if 2**k >= (microbatch_size or 1))
    return max(
        size
        for size in sizes
        if _accumulation.rounding_slack(accumulator, size, microbatch_size or size)
        <= accumulator.slack
    )


def test_all_names_exist_and_are_documented():
    for name in dpmp.__all__:
        assert getattr(dpmp, name).__doc__, name


def test_every_module_has_a_row():
    assert sorted(f"dpmp.{name}" for row in ROWS for name in row) == MODULES


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_downward(name):
    rank = {module: i for i, row in enumerate(ROWS) for module in row}
    own = name.removeprefix("dpmp.")
    for imported in _imports_of(ROOT / f"{own}.py"):
        assert rank[imported] > rank[own], f"{own} imports {imported}"


@pytest.mark.parametrize("name", MODULES)
def test_jax_internals_stay_where_they_belong(name):
    source = (ROOT / f"{name.removeprefix('dpmp.')}.py").read_text()
    assert "jax._src" not in source
    assert "flax" not in source
    parts = set(re.findall(r"jax\.extend\.\w+", source))
    assert parts == {
        "dpmp._jaxpr": {"jax.extend.core"},
        "dpmp._random": {"jax.extend.random"},
    }.get(name, set())


def _imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dpmp"):
            submodule = node.module.removeprefix("dpmp").removeprefix(".")
            yield from [submodule] if submodule else [a.name for a in node.names]
        elif isinstance(node, ast.Import):
            assert not any(a.name.startswith("dpmp") for a in node.names)
