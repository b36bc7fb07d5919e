"""What users see: names, documentation that is true, and who imports whom."""

import ast
import doctest
import graphlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import pathlib
import pkgutil
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpmp

ROOT = pathlib.Path(dpmp.__file__).parent
PICTURE = pathlib.Path(__file__).parents[1] / "docs" / "architecture.md"
_FOUND = list(pkgutil.walk_packages([str(ROOT)], "dpmp."))
MODULES = sorted(m.name for m in _FOUND)
PACKAGES = [m.name for m in _FOUND if m.ispkg]
# Not imported: some need extras.
PATHS = {x: pathlib.Path(importlib.util.find_spec(x).origin) for x in MODULES}
SOURCES = {name: path.read_text() for name, path in PATHS.items()}
NODES = {name: [*ast.walk(ast.parse(text))] for name, text in SOURCES.items()}
# These search for noise, or run programs, for a second and more.
LONG_DOCTESTS = {
    "dpmp.accounting._calibration",
    "dpmp.clipping._adaptive",
    "dpmp.loss_scaling",
    "dpmp.mechanism._dpsgd",
    "dpmp.planning",
    "dpmp.planning._best_of_runs",
    "dpmp.planning._compiled_steps",
    "dpmp.precision._eight_bits",
    "dpmp.tools.audit._canaries",
    "dpmp.tools.devices",
    "dpmp.tools.precision_report._verdict",
}


def _read_floors():
    """The floor of every room, from the picture in the guide."""
    floors, floor = {}, None
    for number, name in re.findall(
        r"^(\d+| ) +(\w+)(?:/|\.py) ", PICTURE.read_text(), re.M
    ):
        floor = int(number) if number.strip() else floor
        floors[name] = floor
    return floors


FLOORS = _read_floors()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in LONG_DOCTESTS else ())
        for name, text in SOURCES.items()
        if ">>> " in text
    ],
)
def test_doctests_are_true(name):
    names = {"jax": jax, "jnp": jnp, "np": np, "optax": optax}
    module = importlib.import_module(name)
    around = vars(importlib.import_module(name.rpartition(".")[0]))
    names |= vars(dpmp) | around
    failures, _ = doctest.testmod(module, extraglobs=names)
    assert failures == 0


def test_public_modules_and_names_are_documented():
    for name in dpmp.__all__:
        public = getattr(dpmp, name)
        assert public.__doc__, name
        if inspect.ismodule(public):
            assert len(public.__all__) == len({*public.__all__})
            assert all(hasattr(public, x) for x in public.__all__), name
            assert "\n\n" in public.__doc__, name  # a paragraph after the first line


def test_one_neighbouring_relation_is_the_default_everywhere():
    default = dpmp.accounting.DEFAULT_RELATION
    assert default.name == "REPLACE_SPECIAL"
    for fun in (
        dpmp.DPSGD,
        dpmp.BoundedSensitivityCallable.sensitivity,
        dpmp.accounting.get_epsilon,
        dpmp.accounting.calibrate_noise_multiplier,
    ):
        parameters = inspect.signature(fun).parameters
        assert parameters["neighboring_relation"].default == default


def test_the_picture_has_every_room():
    rooms = {name.split(".")[1] for name in MODULES}
    assert rooms == set(FLOORS)


def test_imports_go_down():
    for name, imported in ((x, y) for x in MODULES for y in _imports_of(x)):
        room, other = name.split(".")[1], imported.split(".")[1]
        goes_down = FLOORS[other] < FLOORS[room]
        is_on_the_ground = FLOORS[other] == FLOORS[room] == 1
        assert room == other or goes_down or is_on_the_ground, f"{name}: {imported}"


def test_packages_are_used_by_their_faces():
    for name, node in ((x, y) for x in MODULES for y in NODES[x]):
        room = name.split(".")[1]
        path = (getattr(node, "module", None) or "").split(".")
        if not isinstance(node, ast.ImportFrom) or path[0] != "dpmp" or len(path) < 2:
            continue
        package = importlib.import_module(f"dpmp.{path[1]}")
        if path[1] != room and hasattr(package, "__path__"):
            names = {alias.name for alias in node.names}
            assert not any(x.startswith("_") for x in (*path, *names)), name
            face = importlib.import_module(node.module)
            assert names <= {*getattr(face, "__all__", names)}, (name, names)


def test_only_the_mechanism_joins_clipping_and_noise():
    pairs = {("clipping", "noise_addition"), ("noise_addition", "clipping")}
    for name in MODULES:
        rooms = {(name.split(".")[1], x.split(".")[1]) for x in _imports_of(name)}
        assert not pairs & rooms


def test_no_module_imports_itself_by_way_of_others():
    imports = {name: set(_imports_of(name)) for name in MODULES}
    graphlib.TopologicalSorter(imports).prepare()  # raises if there is a circle


def test_modules_of_a_package_import_from_rows_below_their_own():
    found = [x for x in PACKAGES if "own:\n" in importlib.import_module(x).__doc__]
    assert found
    for name in found:
        check_rows(name)


def check_rows(name):
    text = importlib.import_module(name).__doc__.split("own:\n")[1]
    rows = [line.split() for line in text.splitlines() if line.startswith("    ")]
    rank = {f"{name}.{x}": i for i, row in enumerate(rows) for x in row}
    assert set(rank) == {x for x in MODULES if x.rpartition(".")[0] == name}
    for module in rank:
        for imported in _imports_of(module):
            assert rank.get(imported, len(rows)) > rank[module], module


def test_jax_internals_stay_where_they_belong():
    found = {}
    for name, source in SOURCES.items():
        assert "jax._src" not in source, name
        assert "flax" not in source or name == "dpmp.tunix", name
        parts = re.findall(r"jax\.extend(?:\.\w+)?|jax import .*extend", source)
        found[name] = {*parts}
    core, source_info = "jax.extend.core", "jax.extend.source_info_util"
    assert {name: parts for name, parts in found.items() if parts} == {
        "dpmp.programs.interpreter": {core, source_info},
        "dpmp.programs.frozen": {core},
    }


def _imports_of(name):
    for node in NODES[name]:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dpmp"):
            within = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (x if x in MODULES else node.module for x in within)
        elif isinstance(node, ast.Import):
            assert not any(a.name.startswith("dpmp") for a in node.names)


def test_the_version_is_the_same_everywhere():
    citation = (ROOT.parent / "CITATION.cff").read_text()
    assert f"version: {dpmp.__version__}\n" in citation
    assert importlib.metadata.version("dpmp-jax") == dpmp.__version__
