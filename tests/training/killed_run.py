"""A run to be killed: killed_run.py DIR LOG EVERY KEEP DEVICES [ADDRESS PROCESS].

LOG gets a hash of each key that is used, by the process that uses it, and the number of
each step that is released. With an address, this is one of two processes of a job.
"""

import hashlib
import os
import sys
import time

import jax

from dpmp.training._tickets import Ticket

STEPS = 60


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
    from small_runs import PARAMS, Source, fit, new_trainer  # makes arrays

    class SlowSource(Source):
        """Takes some time for a batch, so that the run can be killed at many places."""

        def __getitem__(self, indices):
            time.sleep(0.003)
            return super().__getitem__(indices)

    log, sharding = log_to(log), None
    if jax.device_count() > 1:
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=auto)
        sharding = jax.NamedSharding(mesh, jax.P("data"))

    def callback(state):
        if jax.process_index() == 0:
            log("released", int(state.step))

    params = PARAMS
    if sharding is not None:
        params = jax.device_put(params, jax.NamedSharding(sharding.mesh, jax.P()))
    trainer = new_trainer(microbatch_size=8, iterations=STEPS, noise_multiplier=4.0)
    fit(
        trainer,
        directory,
        state=trainer.init(params),
        data=SlowSource(0, None),
        every=int(every),
        keep=int(keep),
        batch_sharding=sharding,
        callback=callback,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
