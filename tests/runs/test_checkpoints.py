"""A checkpoint gives back the bits that were saved, or says that it cannot."""

import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpmp.runs._checkpoints import Checkpoints, checksum

DTYPES = ["float32", "bfloat16", "float16", "int32", "int8", "bool", "uint32"]


def make_state(seed=0):
    keys = jax.random.split(jax.random.key(seed), len(DTYPES))
    arrays = {
        dtype: (100 * jax.random.normal(key, (3, 5))).astype(dtype)
        for dtype, key in zip(DTYPES, keys, strict=True)
    }
    long = jax.random.key(seed, impl="unsafe_rbg")
    return {"arrays": arrays, "keys": (jax.random.key(seed), long), "none": None}


def words(tree):
    return [
        np.asarray(jax.random.key_data(x) if "key" in str(x.dtype) else x)
        for x in jax.tree.leaves(tree)
    ]


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(words(actual), words(expected), strict=True):
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        assert a.committed == b.committed


@pytest.fixture
def checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    yield checkpoints
    checkpoints.close()


def test_the_newest_checkpoint_comes_back_bit_for_bit(tmp_path, checkpoints):
    assert checkpoints.restore(make_state()) is None
    for step in (0, 5, 10):
        checkpoints.save(step, make_state(step))
    checkpoints.wait()
    assert checkpoints.steps == [5, 10]
    assert_same(checkpoints.restore(make_state()), make_state(10))
    again = Checkpoints(tmp_path)
    assert_same(again.restore(make_state()), make_state(10))
    again.close()


def test_arrays_may_be_overwritten_as_soon_as_save_returns(checkpoints):
    overwrite = jax.jit(lambda x: x * 0, donate_argnums=0)
    x = jnp.arange(1_000_000, dtype=jnp.float32)
    checkpoints.save(1, {"x": x})
    overwrite(x).block_until_ready()
    restored = checkpoints.restore({"x": jnp.zeros(1_000_000)})
    np.testing.assert_array_equal(restored["x"], np.arange(1_000_000))


def test_arrays_return_to_the_places_of_the_given_state(checkpoints):
    checkpoints.save(1, make_state())
    placed = jax.device_put(make_state(1), jax.devices()[0])
    expected = jax.device_put(make_state(), jax.devices()[0])
    assert_same(checkpoints.restore(placed), expected)


def test_a_key_keeps_its_generator(checkpoints):
    checkpoints.save(1, {"key": jax.random.key(3, impl="threefry2x32")})
    restored = checkpoints.restore({"key": jax.random.key(0, impl="unsafe_rbg")})
    assert restored["key"] == jax.random.key(3)


def test_only_the_owner_may_read_the_files(tmp_path, checkpoints):
    checkpoints.save(1, make_state())
    checkpoints.wait()
    for path in (tmp_path / "checkpoints").rglob("*"):
        mode = path.stat().st_mode & 0o777
        assert mode == (0o700 if path.is_dir() else 0o600)


def test_a_folder_that_others_may_read_is_closed_before_anything_is_written(tmp_path):
    (tmp_path / "checkpoints").mkdir(mode=0o755)
    Checkpoints(tmp_path).close()
    assert (tmp_path / "checkpoints").stat().st_mode & 0o777 == 0o700


def test_other_arrays_are_refused_by_name(checkpoints):
    checkpoints.save(1, {"w": jnp.zeros((3, 4))})
    with pytest.raises(ValueError, match=r"array='w', saved='float32\[3, 4\]'"):
        checkpoints.restore({"w": jnp.zeros((3, 5))})
    with pytest.raises(ValueError, match=r"saved=None, wanted='float32\[3\]'"):
        checkpoints.restore({"w": jnp.zeros((3, 4)), "b": jnp.zeros(3)})


def largest_file(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_a_damaged_checkpoint_is_replaced_by_the_one_before(tmp_path, harm):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        state = {"x": jax.random.normal(jax.random.key(step), (5000,))}
        checkpoints.save(step, state)
    checkpoints.close()
    file = largest_file(tmp_path / "checkpoints" / "2")
    if harm == "flip":
        flip(file, file.stat().st_size // 2)
    elif harm == "cut":
        file.write_bytes(file.read_bytes()[:1000])
    else:
        file.unlink()
    checkpoints = Checkpoints(tmp_path)
    with pytest.warns(UserWarning, match="after step 2 .* is damaged"):
        restored = checkpoints.restore({"x": jnp.zeros(5000)})
    np.testing.assert_array_equal(
        restored["x"], jax.random.normal(jax.random.key(1), (5000,))
    )
    checkpoints.close()


def test_no_whole_checkpoint_is_an_error(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {"x": jnp.ones(5000)})
    checkpoints.close()
    largest_file(tmp_path / "checkpoints" / "3").unlink()
    checkpoints = Checkpoints(tmp_path)
    with (
        pytest.warns(UserWarning, match="after step 3 .* is damaged"),
        pytest.raises(ValueError, match=r"must be whole; .* damaged=\[3\]"),
    ):
        checkpoints.restore({"x": jnp.zeros(5000)})
    checkpoints.close()


def test_another_state_after_the_same_steps_replaces_the_checkpoint(checkpoints):
    for seed in (0, 0, 1):
        checkpoints.save(1, make_state(seed))
        assert checkpoints.has(1, make_state(seed))
    assert not checkpoints.has(1, make_state(0))
    assert_same(checkpoints.restore(make_state()), make_state(1))


def test_a_damaged_checkpoint_is_written_again(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, {"x": jnp.full(5000, step)})
    checkpoints.close()
    largest_file(tmp_path / "checkpoints" / "2").unlink()
    checkpoints = Checkpoints(tmp_path)
    like = {"x": jnp.zeros(5000, jnp.int32)}
    with pytest.warns(UserWarning, match="after step 2 .* is damaged"):
        checkpoints.restore(like)
    checkpoints.save(2, {"x": jnp.full(5000, 2)})
    assert int(checkpoints.restore(like)["x"][0]) == 2
    checkpoints.close()


def test_two_arrays_of_one_name_are_refused(checkpoints):
    state = {"a.b": jnp.zeros(2), "a": {"b": jnp.ones(2)}}
    with pytest.raises(ValueError, match=r"a name of its own.*twice=\['a.b'\]"):
        checkpoints.save(1, state)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checksum_sees_every_single_change(dtype):
    x = np.asarray(make_state()["arrays"][dtype])
    sums = {int(checksum(jnp.asarray(x)))}
    for index in np.ndindex(x.shape):
        changed = x.copy()
        changed.view(np.uint8)[index[0], index[1] * x.itemsize] ^= 1
        sums.add(int(checksum(jnp.asarray(changed))))
    assert len(sums) == x.size + 1


def test_a_checksum_sees_an_exchange_of_two_entries():
    assert int(checksum(jnp.array([1, 2]))) != int(checksum(jnp.array([2, 1])))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("factor", [-1, 2, 0.25])
def test_a_checksum_sees_a_multiplied_array(dtype, factor):
    x = jnp.arange(1, 65).astype(dtype)
    assert int(checksum(x * jnp.asarray(factor, dtype))) != int(checksum(x))


@pytest.mark.parametrize("dtype", ["complex64", "int4", "uint2", "float8_e4m3fn"])
def test_a_checksum_sees_arrays_of_rare_types(dtype):
    x = jnp.ones((3, 4)).astype(dtype)
    assert int(checksum(x)) != int(checksum(jnp.zeros_like(x)))


def test_a_checksum_sees_keys():
    sums = {int(checksum(jax.random.key(seed))) for seed in range(3)}
    assert len(sums) == 3


def test_a_checksum_does_not_depend_on_the_sharding():
    x = jax.random.normal(jax.random.key(0), (8, 6))
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    placed = jax.device_put(x, jax.NamedSharding(mesh, jax.P("a")))
    assert int(checksum(placed)) == int(checksum(x))


def test_importing_dpmp_does_not_import_orbax():
    program = "import sys, dpmp; print('orbax' in sys.modules)"
    root = pathlib.Path(__file__).parents[2]
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=root
    )
    assert output.stdout == "False\n"
