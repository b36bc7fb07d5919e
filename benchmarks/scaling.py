"""What does each device hold and send in a training step of a large model?

    python -m benchmarks.scaling                     # eight minutes on two cores
    python -m benchmarks.scaling --topologies h100:1x8x8 --sharded --model 8B

Compiles a training step of a decoder with a billion parameters and 1024 tokens, for
meshes of 1, 8, 64 and 256 devices that are not there: virtual CPU devices, and shapes
in place of arrays. Nothing is run. `--model 8B` has more parameters. It records the
bytes of each device and the collectives, with whole parameters on each device, and with
parameters and optimizer sharded over the devices. With `--topologies h100:1x8x8` it
compiles for 64 GPUs (see h100.py), and with `v5p:2x2x2` for TPUs, which takes `pip
install libtpu`, and no TPU. With `--model-axis 8`, groups of eight devices divide each
product of the model. With `--lora 16`, the model is frozen, and adapters of rank 16 for
all matrices of its layers are trained.

Every mesh has a process of its own.
"""

from benchmarks import h100  # before jax

# isort: split
import concurrent.futures
import functools
import math
import multiprocessing
import sys
import time
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

import dpmp
from benchmarks import harness, steps
from benchmarks.collectives import collectives
from benchmarks.gpu.programs import REPEATABLE
from benchmarks.transformer import transformer
from dpmp import _meshes
from dpmp import lora as adapters

# The large models: a layer has 12 times the square of the width as parameters.
_LARGE = {
    "1B": {"layers": 18, "width": 2048, "num_heads": 16, "vocabulary": 32768},
    "8B": {"layers": 32, "width": 4096, "num_heads": 32, "vocabulary": 128256},
    "13B": {"layers": 40, "width": 5120, "num_heads": 40, "vocabulary": 128256},
    "70B": {"layers": 80, "width": 8192, "num_heads": 64, "vocabulary": 128256},
}
# Where the parameters are: "data" divides what a step gathers, and "model" divides
# heads and hidden units, so that a product needs no others.
_PLACES = {
    "embed": jax.P("model", "data"),
    "position": jax.P(None, "data"),
    "qkv": jax.P(None, "data", "model"),
    "out": jax.P(None, "model", "data"),
    "up": jax.P(None, "data", "model"),
    "down": jax.P(None, "model", "data"),
    "norms": jax.P(),
    "head": jax.P("data", "model"),
}
_ADAPTED = "layers/(qkv|out|up|down)"
_LARGE_MICROBATCH, _NUM_MICROBATCHES = 1, 4


def make_trainer(
    loss_fn: Any, params: Any, batch_size: int, microbatch_size: int
) -> dpmp.DPTrainer:
    """A trainer with book-keeping in bfloat16 and Adam."""
    return steps.make_trainer(
        loss_fn,
        "mixed_bfloat16",
        num_examples=1024 * batch_size,
        expected_batch_size=0.8 * batch_size,
        truncated_batch_size=batch_size,
        microbatch_size=microbatch_size,
        iterations=12,
        method="book_keeping",
        num_parameters=sum(math.prod(x.shape) for x in jax.tree.leaves(params)),
    )


def make_mesh(topology: str = "", model_axis: int = 1) -> jax.sharding.Mesh:
    """The devices that are there, or those of a topology."""
    devices = jax.devices()
    kind, _, name = topology.partition(":")
    if kind == "h100":
        devices = h100.topology(name).devices
    elif topology:
        devices = topologies.get_topology_desc(topology, "tpu").devices
    auto = (jax.sharding.AxisType.Auto,) * 2
    grid = np.array(devices).reshape(-1, model_axis)
    return jax.sharding.Mesh(grid, ("data", "model"), axis_types=auto)


def place_of(path: Any, mesh: jax.sharding.Mesh) -> jax.NamedSharding:
    """Where an array of the parameters or of the optimizer is."""
    names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    if names[-1] in adapters.Factors._fields:
        _, inputs, outputs = _PLACES[names[-2]]
        # The axes of a factor: (layers, inputs, rank) or (layers, rank, outputs).
        axes = (None, inputs) if names[-1] == "a" else (None, None, outputs)
        return jax.NamedSharding(mesh, jax.P(*axes))
    return jax.NamedSharding(mesh, _PLACES.get(names[-1], jax.P()))


class _Run(NamedTuple):
    """A training step of a large model, to be compiled."""

    lowered: jax.stages.Lowered
    num_trained: int
    frozen: Any  # a tree of shapes with shardings


def _full(loss_fn: Any, params: Any, tokens: Any, make: Any, place: Any) -> _Run:
    """Trains all parameters."""
    trainer = make(loss_fn, params)
    state = place(jax.eval_shape(trainer.init, params))
    return _Run(trainer.lower(state, tokens), trainer.mechanism.num_parameters, ())


def _lora(
    loss_fn: Any, params: Any, tokens: Any, make: Any, place: Any, rank: int
) -> _Run:
    """Trains adapters of parameters in bfloat16.

    `DPTrainer` makes arrays that a loss uses an argument of its step. Here, shapes
    stand for them, so the program around that step has this argument.
    """
    frozen = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), params)
    example = jax.eval_shape(lambda x: x[:1], tokens)

    def init(frozen: Any, example: Any) -> Any:
        args = {"fun": loss_fn, "example_args": (example,)}
        return adapters.init(jax.random.key(0), frozen, rank, _ADAPTED, **args)

    trained = jax.eval_shape(init, frozen, example)

    def trainer(frozen: Any) -> dpmp.DPTrainer:
        return make(adapters.apply(loss_fn, frozen), trained)

    def first_state(frozen: Any, trained: Any) -> Any:
        return trainer(frozen).init(trained)._replace(spent=None)

    state = place(jax.eval_shape(first_state, frozen, trained))

    def step(frozen: Any, state: Any, keys: Any, batch: Any, is_padding: Any) -> Any:
        make_program = trainer(frozen)._step.make_program
        program, constants = make_program(places, tokens, spec_of)
        return program(state, keys, batch, is_padding, (), constants)

    places, placed = state, place(frozen)
    specs = {x.shape: x.sharding.spec for x in jax.tree.leaves(placed)}

    def spec_of(x: Any) -> jax.P:
        return specs.get(x.shape, jax.P())

    keys = [jax.ShapeDtypeStruct((4,), jnp.uint32)] * 3
    is_padding = jax.ShapeDtypeStruct(tokens.shape[:1], jnp.bool_)
    jitted = jax.jit(
        step,
        donate_argnums=1,
        # In the shapes, shardings would become types, which bind a loop to one mesh.
        in_shardings=(jax.tree.map(lambda x: x.sharding, placed), *[None] * 4),
    )
    lowered = jitted.lower(frozen, state, keys, tokens, is_padding)
    num_trained = sum(math.prod(x.shape) for x in jax.tree.leaves(trained))
    return _Run(lowered, num_trained, placed)


def compile_step(
    *,
    shards_parameters: bool,
    model: str,
    layers: int | None,
    length: int,
    topology: str,
    model_axis: int,
    rank: int | None,
) -> dict[str, Any]:
    """Compiles the step of a large model; returns bytes and collectives."""
    mesh, start = make_mesh(topology, model_axis), time.monotonic()
    whole = jax.NamedSharding(mesh, jax.P())
    shape = _LARGE[model] | ({"layers": layers} if layers else {})
    params, loss_fn = transformer(**shape, length=length)
    microbatch_size = _LARGE_MICROBATCH * mesh.shape["data"]
    batch_size = _NUM_MICROBATCHES * microbatch_size

    def make(loss_fn: Any, params: Any) -> dpmp.DPTrainer:
        return make_trainer(loss_fn, params, batch_size, microbatch_size)

    def placed(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        place = place_of(path, mesh) if shards_parameters else whole
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    place = functools.partial(jax.tree_util.tree_map_with_path, placed)
    by_example = jax.NamedSharding(mesh, jax.P("data"))
    tokens = jax.ShapeDtypeStruct((batch_size, length), jnp.int32, sharding=by_example)
    options: Any = h100.OPTIONS | REPEATABLE if topology.startswith("h100") else {}
    args = loss_fn, params, tokens, make, place
    # jax does not know the memory of a device that it does not have.
    memory = 2**36 if topology.startswith("h100") else _meshes.memory_of_device()
    with mock.patch.object(_meshes, "memory_of_device", return_value=memory):
        run = _lora(*args, rank) if rank else _full(*args)
    compiled: Any = run.lowered.compile(options)
    used = compiled.memory_analysis()
    found = collectives(compiled.as_text())
    # A gradient of even one more example would be larger than all parameters.
    largest = max(math.prod(x.shape) for x in jax.tree.leaves(params))
    # Collectives return frozen arrays too, so their size tells less with adapters.
    is_no_larger = all(x.num_entries <= largest for x in found)
    checks = {"no_larger_than_a_parameter": is_no_larger}
    return {
        "compiled_for": topology or "virtual CPUs",
        "devices": mesh.size,
        **({"model_axis": model_axis} if model_axis > 1 else {}),
        "parameters": "sharded" if shards_parameters else "whole",
        "num_parameters": run.num_trained,
        "model": model,
        **shape,
        "length": length,
        "microbatch_of_a_device": _LARGE_MICROBATCH,
        "bytes_of_state": used.alias_size_in_bytes,
        "bytes_of_temporaries": used.temp_size_in_bytes,
        "bytes_of_collectives": sum(x.num_bytes * n for x, n in found.items()),
        "collectives": {str(x): n for x, n in found.items()},
        **(_of_frozen_model(run.frozen) if rank else checks),
        "seconds_to_compile": time.monotonic() - start,
    }


def _of_frozen_model(frozen: Any) -> dict[str, int]:
    arrays = jax.tree.leaves(frozen)
    parts = [math.prod(x.sharding.shard_shape(x.shape)) for x in arrays]
    num_bytes = [n * x.dtype.itemsize for n, x in zip(parts, arrays, strict=True)]
    num_frozen = sum(math.prod(x.shape) for x in arrays)
    return {"num_frozen": num_frozen, "bytes_of_frozen_model": sum(num_bytes)}


def _apart(devices: int, **task: Any) -> harness.Lines:
    """Compiles in a process of its own; no figures if that fails."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, spawn) as pool:
        running = pool.submit(_compile_for, devices, task)
    try:
        yield running.result()
    except Exception as error:  # the other meshes go on
        sys.stderr.write(f"failed: {task} on {devices} devices: {error}\n")


def _compile_for(devices: int, task: dict[str, Any]) -> dict[str, Any]:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    return compile_step(**task)


def benchmark(
    devices: str = "",
    topologies: str = "",
    model_axis: int = 1,
    model: str = "1B",
    layers: int | None = None,
    length: int = 1024,
    lora: int | None = None,
    sharded: bool = False,
) -> harness.Lines:
    """A line for each mesh, and for whole and sharded parameters."""
    size = {"model": model, "layers": layers, "length": length}
    size |= {"model_axis": model_axis, "rank": lora}
    numbers = [int(n) for n in devices.split()] or [1, 8, 64, 256]
    meshes = [(1, x) for x in topologies.split()] or [(n, "") for n in numbers]
    for num, topology in meshes:
        is_one = num == 1 and not topology
        for shards in (False,) if is_one else (True,) if sharded else (False, True):
            task = {**size, "shards_parameters": shards, "topology": topology}
            yield from _apart(num, **task)


if __name__ == "__main__":
    harness.main(benchmark, tiny={"devices": "2", "layers": 1, "length": 16})
