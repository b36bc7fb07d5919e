"""A run to be killed: killed_run.py DIR LOG EVERY KEEP DEVICES [ADDRESS PROCESS].

LOG gets a hash of each key that is used, by the process that uses it, and the hash of
the parameters after each step that is released. With an address, this is one of two
processes of a job.
"""

import hashlib
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpmp
from dpmp.training._tickets import Ticket

SIZE, STEPS, DELTA = 32, 60, 1e-3


class Source:
    """Takes some time for each batch, so that the run can be killed at many places."""

    def __len__(self):
        return SIZE

    def __getitem__(self, indices):
        time.sleep(0.003)
        rows = np.random.default_rng(0).normal(size=(SIZE, 3)).astype(np.float32)
        return {"x": rows[indices], "y": rows[indices].sum(axis=1)}


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def log_to(path):
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    take = Ticket.take

    def log(*words):
        os.write(descriptor, (" ".join(map(str, words)) + "\n").encode())

    def recorded(self, *uses):
        keys = take(self, *uses)
        for use, key in zip(uses, keys, strict=True):
            digest = hashlib.sha256(key.tobytes()).hexdigest()
            log("key", use, self.step, digest, jax.process_index())
        return keys

    Ticket.take = recorded
    return log


def main(directory, log, every, keep, devices, address=None, process=0):
    jax.config.update("jax_num_cpu_devices", int(devices))
    if address is not None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, 2, int(process))
    log, sharding = log_to(log), None
    if jax.device_count() > 1:
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=auto)
        sharding = jax.NamedSharding(mesh, jax.P("data"))
    trainer = dpmp.DPTrainer(
        mechanism=dpmp.DPSGD(
            num_examples=SIZE,
            expected_batch_size=8,
            microbatch_size=8,
            iterations=STEPS,
            l2_clip_norm=1.0,
            noise_multiplier=4.0,
            delta=DELTA,
        ),
        loss_fn=loss_fn,
        optimizer=optax.sgd(0.1, momentum=0.9),
        policy="float32",
    )

    def callback(state):
        if jax.process_index() == 0:
            params = np.asarray(state.params["w"].addressable_shards[0].data)
            digest = hashlib.sha256(params.tobytes()).hexdigest()
            log("released", int(state.step), digest)

    params = {"w": np.zeros(3, np.float32)}
    if sharding is not None:
        params = jax.device_put(params, jax.NamedSharding(sharding.mesh, jax.P()))
    trainer.fit(
        trainer.init(params),
        Source(),
        checkpoint_dir=directory,
        every=int(every),
        keep=int(keep),
        batch_sharding=sharding,
        callback=callback,
        progress=False,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
