"""What does each device hold and send in a training step of a large model?

    python -m benchmarks.scaling                     # eight minutes on two cores
    python -m benchmarks.scaling --topologies h100:1x8x8 --sharded --model 8B

Compiles a training step of a decoder with a billion parameters and 1024 tokens, for
meshes of 1, 8, 64 and 256 devices that are not there: virtual CPU devices, and shapes
in place of arrays. Nothing is run. `--model 8B` has more parameters. It records the
bytes of each device and the collectives, with whole parameters on each device, and with
parameters and optimizer sharded over the devices. With `--topologies h100:1x8x8` it
compiles for 64 GPUs, which takes `pip install --no-deps jax-cuda12-plugin
jax-cuda12-pjrt`, of the version of jax, and no GPU. As kernels are not tried out on a
device, those in a program may be others than are chosen on one. With `v5p:2x2x2` it
compiles for TPUs, which takes `pip install libtpu`, and no TPU. With `--model-axis 8`,
groups of eight devices divide each product of the model. With `--lora 16`, the model is
frozen, and adapters of rank 16 for all matrices of its layers are trained.

Every mesh has a process of its own.
"""

import concurrent.futures
import functools
import math
import multiprocessing
import os
import pathlib
import sys
import time
from typing import Any, NamedTuple
from unittest import mock

# Before jax is there: the plugin would look for a driver, and stop at that.
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

import dpmp
from benchmarks import harness, models, steps
from benchmarks.collectives import collectives
from benchmarks.gpu.programs import REPEATABLE
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
_ADAPTED = "blocks/(qkv|out|up|down)"
# An H100 with 80 GB, as XLA describes devices.
_H100 = pathlib.Path(__file__).with_name("h100.textproto")
# Kernels of Triton have to be tried out on a device, and without that some tiles fit
# no product.
_OPTIONS_OF_H100 = {"xla_gpu_enable_triton_gemm": False}
_LARGE_MICROBATCH, _NUM_MICROBATCHES = 1, 4


def make_mesh(topology: str = "", model_axis: int = 1) -> jax.sharding.Mesh:
    """The devices that are there, or those of a topology."""
    devices = jax.devices()
    kind, _, name = topology.partition(":")
    if kind == "h100":
        devices = _h100s(name).devices
    elif topology:
        devices = topologies.get_topology_desc(topology, "tpu").devices
    auto = (jax.sharding.AxisType.Auto,) * 2
    grid = np.array(devices).reshape(-1, model_axis)
    return jax.sharding.Mesh(grid, ("data", "model"), axis_types=auto)


def _h100s(name: str) -> Any:
    """Devices that are not there: slices x hosts x devices of a host."""
    if not harness.is_installed("jax_cuda12_plugin"):
        raise SystemExit(
            "The plugin of jax for CUDA must be installed; it was not found. Run: "
            "pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt"
        )
    return topologies.get_topology_desc(
        platform="cuda", target_config=_H100.read_text(), topology=name
    )


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


def _lowered(
    loss_fn: Any, params: Any, batch: Any, make: Any, place: Any, rank: int | None
) -> _Run:
    """Trains all parameters, or adapters of parameters in bfloat16.

    `DPTrainer` makes arrays that a loss uses an argument of its step. Here, shapes
    stand for them, so the program around that step has this argument.
    """
    frozen, trained = (), params
    if rank:
        narrow = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
        frozen = jax.tree.map(lambda x: narrow(x.shape), params)

        def init(frozen: Any, batch: Any) -> Any:
            args = {"fun": loss_fn, "example_args": (batch,)}
            return adapters.init(jax.random.key(0), frozen, rank, _ADAPTED, **args)

        example = jax.eval_shape(lambda x: jax.tree.map(lambda x: x[:1], x), batch)
        trained = jax.eval_shape(init, frozen, example)
    num_trained = sum(math.prod(x.shape) for x in jax.tree.leaves(trained))

    def trainer(frozen: Any) -> dpmp.DPTrainer:
        loss = adapters.apply(loss_fn, frozen) if rank else loss_fn
        return make(loss, num_parameters=num_trained)

    def first_state(frozen: Any, trained: Any) -> Any:
        return trainer(frozen).init(trained)._replace(spent=None)

    state = place(jax.eval_shape(first_state, frozen, trained))
    placed = place(frozen)
    specs = {x.shape: x.sharding.spec for x in jax.tree.leaves(placed)}

    def spec_of(x: Any) -> jax.P:
        return specs.get(x.shape, jax.P())

    def step(frozen: Any, given: Any, keys: Any, rows: Any, is_padding: Any) -> Any:
        program, constants = trainer(frozen)._step.make_program(state, batch, spec_of)
        return program(given, keys, rows, is_padding, (), constants)

    keys = [jax.ShapeDtypeStruct((4,), jnp.uint32)] * 3
    is_padding = jax.ShapeDtypeStruct(batch["tokens"].shape[:1], jnp.bool_)
    jitted = jax.jit(
        step,
        donate_argnums=1,
        # In the shapes, shardings would become types, which bind a loop to one mesh.
        in_shardings=(jax.tree.map(lambda x: x.sharding, placed), *[None] * 4),
    )
    lowered = jitted.lower(frozen, state, keys, batch, is_padding)
    return _Run(lowered, num_trained, placed)


def compile_step(
    devices: int,
    topology: str,
    shards_parameters: bool,
    *,
    model: str,
    layers: int | None,
    length: int,
    model_axis: int,
    rank: int | None,
) -> dict[str, Any]:
    """Compiles the step of a large model; returns bytes and collectives."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    mesh, start = make_mesh(topology, model_axis), time.monotonic()
    shape = _LARGE[model] | ({"layers": layers} if layers else {})
    heads, sizes = shape["num_heads"], {k: shape[k] for k in ("width", "vocabulary")}
    sizes |= {"depth": shape["layers"], "heads": heads, "length": length}
    task = functools.partial(models.transformer, jnp.float32, 1, scan=True, **sizes)
    params = jax.eval_shape(lambda: task().params)
    microbatch_size = _LARGE_MICROBATCH * mesh.shape["data"]
    batch_size = _NUM_MICROBATCHES * microbatch_size
    make = functools.partial(
        steps.make_trainer,
        policy="mixed_bfloat16",
        num_examples=1024 * batch_size,
        expected_batch_size=0.8 * batch_size,
        truncated_batch_size=batch_size,
        microbatch_size=microbatch_size,
        iterations=12,
        method="book_keeping",
    )

    def placed(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        whole = jax.NamedSharding(mesh, jax.P())
        place = place_of(path, mesh) if shards_parameters else whole
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    place = functools.partial(jax.tree_util.tree_map_with_path, placed)
    by_example = jax.NamedSharding(mesh, jax.P("data"))
    tokens = jax.ShapeDtypeStruct((batch_size, length), jnp.int32, sharding=by_example)
    options: Any = _OPTIONS_OF_H100 | REPEATABLE if topology.startswith("h100") else {}
    loss_fn = models.transformer_loss(heads, scan=True)
    # jax does not know the memory of a device that it does not have.
    memory = 2**36 if topology.startswith("h100") else _meshes.memory_of_device()
    with mock.patch.object(_meshes, "memory_of_device", return_value=memory):
        run = _lowered(loss_fn, params, {"tokens": tokens}, make, place, rank)
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
    spawn = multiprocessing.get_context("spawn")
    for mesh in meshes:
        is_one = mesh == (1, "")
        for shards in (False,) if is_one else (True,) if sharded else (False, True):
            with concurrent.futures.ProcessPoolExecutor(1, spawn) as pool:
                running = pool.submit(compile_step, *mesh, shards, **size)
            try:
                yield running.result()
            except Exception as error:  # the other meshes go on
                sys.stderr.write(f"failed: {mesh}, {shards}, {size}: {error}\n")


if __name__ == "__main__":
    harness.main(benchmark, tiny={"devices": "2", "layers": 1, "length": 16})
