"""A checkpoint gives back the bits that were saved, or says that it cannot."""

import pathlib
import resource
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ledgers import DELTA, charged, file_of, steps
from small_runs import checkpoints, same

from dpmp.runs import RunDirectory, _arrays, opened
from dpmp.runs._ledger import Ledger

pytestmark = pytest.mark.filterwarnings("ignore:the ledger has paid for steps")

DTYPES = ["float32", "bfloat16", "float16", "int32", "int8", "bool", "uint32"]


def make_state(seed=0):
    keys = jax.random.split(jax.random.key(seed), len(DTYPES))
    arrays = {
        dtype: (100 * jax.random.normal(key, (3, 5))).astype(dtype)
        for dtype, key in zip(DTYPES, keys, strict=True)
    }
    long = jax.random.key(seed, impl="unsafe_rbg")
    empty = jnp.zeros((0, 3))
    return {"arrays": arrays, "keys": (jax.random.key(seed), long), "none": None} | {
        "empty": empty,
        "number": jnp.float32(seed),
    }


def assert_same(actual, expected):
    assert same(*(jax.tree.map(words, x) for x in (actual, expected)))
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        assert a.committed == b.committed


def words(x):
    return jax.random.key_data(x) if "key" in str(x.dtype) else x


def save(directory, step, state, **facts):
    with opened(directory) as run:
        run.release(state, steps(step - 1, step), facts, keep=2)


def restore(directory, like):
    found = RunDirectory(directory, DELTA).newest(like)
    return found and found[0]


class TestRoundTrip:
    def test_the_newest_checkpoint_comes_back_bit_for_bit(self, tmp_path):
        assert restore(tmp_path, make_state()) is None
        for step in (1, 5, 10):
            save(tmp_path, step, make_state(step), more=[step])
        assert checkpoints(tmp_path) == [5, 10]
        state, facts = RunDirectory(tmp_path, DELTA).newest(make_state())
        assert_same(state, make_state(10))
        assert (facts["step"], facts["more"]) == (10, [10])

    def test_arrays_may_be_overwritten_as_soon_as_it_is_written(
        self, tmp_path, monkeypatch
    ):
        overwrite = jax.jit(lambda x: x * 0, donate_argnums=0)
        x, write = jnp.arange(1_000_000, dtype=jnp.float32), _arrays.write

        def write_and_overwrite(folder, state):
            write(folder, state)
            overwrite(state["x"]).block_until_ready()

        monkeypatch.setattr(_arrays, "write", write_and_overwrite)
        save(tmp_path, 1, {"x": x})
        restored = restore(tmp_path, {"x": jnp.zeros(1_000_000)})
        np.testing.assert_array_equal(restored["x"], np.arange(1_000_000))

    def test_a_checkpoint_of_two_devices_can_be_read_on_one_and_on_four(self, tmp_path):
        def on(number):
            mesh = jax.make_mesh(
                (number,),
                ("a",),
                axis_types=(jax.sharding.AxisType.Auto,),
                devices=jax.devices()[-number:],
            )
            return jax.NamedSharding(mesh, jax.P("a"))

        x = jax.random.normal(jax.random.key(0), (8, 3))
        save(tmp_path, 1, {"x": jax.device_put(x, on(2)), "n": jnp.float32(3)})
        for number in (1, 4):
            like = {"x": jax.device_put(0 * x, on(number)), "n": jnp.float32(0)}
            expected = {"x": jax.device_put(x, on(number)), "n": jnp.float32(3)}
            assert_same(restore(tmp_path, like), expected)
        uncommitted = {"x": 0 * x, "n": jnp.float32(0)}
        assert_same(restore(tmp_path, uncommitted), {"x": x + 0, "n": jnp.float32(3)})

    def test_names_and_paths_may_have_any_characters(self, tmp_path):
        directory = tmp_path / "gs:" / "run [1] * a?b {x} ünï %7"
        directory.mkdir(parents=True)
        names = ["a.b", "a/b", "", " ", "*", "..", "['a']['b']", "ä", "0", 0, "a"]
        state = {str(type(x)) + str(x): jnp.full(2, i) for i, x in enumerate(names)}
        state |= {"a.b": jnp.zeros(2), "a": {"b": jnp.ones(2), "": jnp.ones(3)}}
        save(directory, 1, state)
        assert_same(restore(directory, jax.tree.map(jnp.zeros_like, state)), state)


class TestOtherArrays:
    def test_other_arrays_are_refused_by_name(self, tmp_path):
        save(tmp_path, 1, {"w": jnp.zeros((3, 4))})
        for like, said in (
            ({"w": jnp.zeros((3, 5))}, r"\['w'\].*saved='float32\[3, 4\]'"),
            ({"w": jnp.zeros((3, 4)), "b": jnp.zeros(3)}, r"wanted='float32\[3\]'"),
            ({"w": jnp.zeros((3, 4), int)}, r"wanted='int32\[3, 4\]'"),
            ({}, r"\['w'\].*wanted=None.*Build the model"),
        ):
            with pytest.raises(ValueError, match=f"arrays of the checkpoint.*{said}"):
                restore(tmp_path, like)
        save(tmp_path, 2, {"key": jax.random.key(3, impl="threefry2x32")})
        with pytest.raises(ValueError, match=r"saved='key<fry>\[\]', wanted='key<urbg"):
            restore(tmp_path, {"key": jax.random.key(0, impl="unsafe_rbg")})


def damage(folder, harm):
    file = max(
        (path for path in folder.rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    content = bytearray(file.read_bytes())
    if harm == "flip":
        content[len(content) // 2] ^= 0x10
        file.write_bytes(content)
    elif harm == "cut":
        file.write_bytes(content[:1000])
    elif harm == "remove":
        file.unlink()
    elif harm == "another file":
        (folder / "arrays" / "more").touch()
    elif harm == "facts":
        (folder / "facts.json").write_text("{")
    elif harm == "other facts":
        text = (folder / "facts.json").read_text()
        (folder / "facts.json").write_text(text.replace('"step": 2', '"step": 3'))
    elif harm == "ledger":
        copy = folder / "ledger.jsonl"
        copy.write_bytes(copy.read_bytes()[:-9] + b"\0" * 9)


HARMS = ["flip", "cut", "remove", "another file", "facts", "other facts", "ledger"]


class TestDamage:
    @pytest.fixture(scope="class")
    @staticmethod
    def undamaged(tmp_path_factory):
        directory = tmp_path_factory.mktemp("run")
        for step in (1, 2):
            state = {"x": jax.random.normal(jax.random.key(step), (5000,))}
            save(directory, step, state)
        return directory

    @pytest.mark.parametrize("harm", HARMS)
    def test_a_damaged_checkpoint_is_replaced_by_the_one_before(
        self, tmp_path, undamaged, harm
    ):
        directory = shutil.copytree(undamaged, tmp_path / "run")
        damage(directory / "checkpoints" / "2", harm)
        said = r"after step 2 .* is damaged, .* one before.*at a new cost"
        with pytest.warns(UserWarning, match=said):
            restored = restore(directory, {"x": jnp.zeros(5000)})
        expected = jax.random.normal(jax.random.key(1), (5000,))
        np.testing.assert_array_equal(restored["x"], expected)

    def test_a_damaged_checkpoint_is_removed_by_the_next(self, tmp_path, undamaged):
        directory = shutil.copytree(undamaged, tmp_path / "run")
        shutil.copytree(
            directory / "checkpoints" / "2", directory / "checkpoints" / "9"
        )
        damage(directory / "checkpoints" / "2", "flip")
        for step, left in ((2, [1, 2]), (3, [2, 3])):
            state = {"x": jnp.full(5000, float(step))}
            save(directory, step, state)
            assert checkpoints(directory) == left
            assert int(restore(directory, {"x": jnp.zeros(5000)})["x"][0]) == step
        names = {x.name for x in (directory / "checkpoints").iterdir()}
        assert names == {"2", "3"}


LIKE = {"x": jnp.zeros(3)}


class TestLedger:
    """The ledger must account for the checkpoint, and for all before it."""

    @pytest.fixture(scope="class")
    @staticmethod
    def saved(tmp_path_factory):
        directory = tmp_path_factory.mktemp("run")
        Ledger(directory).append(charged(0, 1))
        for step in (1, 2):
            save(directory, step, LIKE)
        return directory

    @pytest.fixture
    def directory(self, saved, tmp_path):
        return shutil.copytree(saved, tmp_path / "run")

    @pytest.mark.parametrize("lines", [None, 0, 1, 2])
    def test_a_ledger_behind_its_checkpoint_is_refused(self, directory, lines):
        content = file_of(directory).read_bytes().splitlines(keepends=True)
        if lines is None:
            file_of(directory).unlink()
        else:
            file_of(directory).write_bytes(b"".join(content[:lines]))
        with pytest.raises(ValueError, match=r"as new as the checkpoints.*Restore the"):
            restore(directory, LIKE)

    def test_an_older_ledger_that_went_on_by_itself_is_refused(self, directory):
        content = file_of(directory).read_bytes().splitlines(keepends=True)
        ledger = Ledger(directory)
        (*_, record) = ledger.records
        file_of(directory).write_bytes(content[0])
        Ledger(directory).append(record)
        with pytest.raises(ValueError, match="of steps before it"):
            restore(directory, LIKE)

    def test_a_ledger_that_is_ahead_is_welcome(self, directory):
        Ledger(directory).append(charged(2, 5))
        assert restore(directory, LIKE) is not None


def test_a_full_disk_is_an_error_with_a_short_message(tmp_path):
    """No file may be longer than the limit, as `ulimit -f` says."""
    state = {"x": jax.random.normal(jax.random.key(0), (100, 500))}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError, match=r"File too large.*Make room") as caught:
            save(tmp_path, 1, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(str(caught.value)) < 1000
    assert checkpoints(tmp_path) == []
    save(tmp_path, 1, state)
    assert_same(restore(tmp_path, jax.tree.map(jnp.zeros_like, state)), state)


@pytest.mark.slow
def test_importing_dpmp_does_not_import_orbax():
    program = "import sys, dpmp; print('orbax' in sys.modules)"
    root = pathlib.Path(__file__).parents[2]
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=root
    )
    assert output.stdout == "False\n"
