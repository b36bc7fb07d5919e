"""Private training by several processes, each with its own devices and its own data.

    python examples/multi_host.py

starts two local processes that train together on their CPUs (half a minute on two
cores; most of it is starting and compiling). On a cluster, start the same command once
on each machine: jax detects Slurm, Kubernetes, Open MPI and Cloud TPUs, and this script
then starts no processes of its own. The parameters are the same, bit for bit, for any
number of processes and devices: the sums are exact, and the noise is a function of its
key and of the place of each parameter. With `--checkpoints DIR`, the same command goes
on after a process has failed.

Result: 40 steps reach an accuracy of 0.976 on held-out examples, at epsilon 3. The last
line that is printed is a hash of the parameters. It was the same for 1 and 2 processes
with 1 and 2 devices each. To show this, the script uses a key that everybody knows.
Leave `prng_key` out for your own data: whoever has the key can subtract the noise.
"""

import argparse
import functools
import hashlib
import pathlib
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpmp

NUM_EXAMPLES, NUM_FEATURES, NUM_CLASSES, WIDTH = 20_000, 64, 10, 256
EXAMPLES_OF_A_DEVICE = 8  # in one microbatch

# After a failure, the other processes end soon, instead of after 100 to 300 seconds.
_join = functools.partial(
    jax.distributed.initialize,
    heartbeat_timeout_seconds=10,
    shutdown_timeout_seconds=10,
)


class Examples:
    """A dataset that computes the rows it is asked for, as another one would read them.

    A process asks for the rows of its own devices only.
    """

    def __init__(self, first, num_examples):
        """The examples from the number `first` on."""
        self.first, self.num_examples = first, num_examples
        self.centers = np.random.default_rng(0).normal(size=(NUM_CLASSES, NUM_FEATURES))

    def __len__(self):
        """The number of examples in the dataset."""
        return self.num_examples

    def __getitem__(self, indices):
        """The rows at some indices."""
        numbers = self.first + np.asarray(indices)
        label = numbers % NUM_CLASSES
        noise = [np.random.default_rng(i).normal(size=NUM_FEATURES) for i in numbers]
        noise = np.reshape(noise, (len(numbers), NUM_FEATURES))
        x = self.centers[label] + 2 * noise
        return {"x": x.astype(np.float32), "label": label.astype(np.int32)}


def init_params():
    """The initial parameters, in NumPy; they are the same on all processes."""
    rng = np.random.default_rng(1)
    scale = NUM_FEATURES**-0.5
    return {
        "hidden": np.float32(rng.normal(0, scale, (NUM_FEATURES, WIDTH))),
        "out": np.zeros((WIDTH, NUM_CLASSES), np.float32),
    }


def logits_of(params, x):
    """The logits of a batch."""
    return jnp.tanh(x @ params["hidden"]) @ params["out"]


def loss(params, batch):
    """The mean loss of a batch."""
    logits = logits_of(params, batch["x"]).astype(jnp.float32)
    return jnp.mean(
        optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    )


def train(num_steps, checkpoint_dir):
    """Trains on all devices of all processes; returns the state and the epsilon."""
    mesh = jax.make_mesh(
        (jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    mechanism = dpmp.DPSGD(
        num_examples=NUM_EXAMPLES,
        expected_batch_size=400,
        microbatch_size=EXAMPLES_OF_A_DEVICE * jax.device_count(),
        iterations=40,
        l2_clip_norm=1.0,
        method="per_example",  # its exact sums do not depend on the devices
    ).calibrate(epsilon=3.0, delta=1e-5)
    trainer = dpmp.DPTrainer(
        mechanism=mechanism,
        loss_fn=loss,
        optimizer=optax.adam(0.01),
        policy="float32",
        # A real run leaves the key out: the first process then draws secret bits.
        prng_key=jax.random.key(0),
    )
    # Each device holds its share of each parameter. The optimizer's state follows.
    sharded = jax.NamedSharding(mesh, jax.P("data"))
    params = jax.device_put(init_params(), sharded)
    state = trainer.fit(
        trainer.init(params),
        Examples(0, NUM_EXAMPLES),
        stop_at=num_steps,
        batch_sharding=sharded,
        checkpoint_dir=checkpoint_dir,
        every=10,
    )
    return state, trainer.guarantee(state).epsilon


def report(state, epsilon, output):
    """Prints the accuracy on public examples, and writes the parameters to a file."""
    everywhere = jax.tree.map(
        lambda x: jax.NamedSharding(x.sharding.mesh, jax.P()), state.params
    )
    params = jax.tree.map(np.asarray, jax.device_put(state.params, everywhere))
    if jax.process_index() != 0:
        return
    public = Examples(NUM_EXAMPLES, 2000)[np.arange(2000)]
    is_right = logits_of(params, public["x"]).argmax(axis=1) == public["label"]
    digest = hashlib.sha256(b"".join(params[name].tobytes() for name in sorted(params)))
    print(f"{jax.process_count()} processes, {jax.device_count()} devices")
    print(f"accuracy {is_right.mean():.3f} at epsilon {epsilon:.2f}")
    print(f"parameters {digest.hexdigest()[:16]}")
    if output is not None:
        np.savez(output, **params)


def is_in_a_cluster():
    """Whether jax has found a cluster, and has joined its processes."""
    try:
        _join()
    except ValueError:  # no address of a coordinator, given or detected
        return False
    return True


def start_locally(num_processes):
    """Runs this script once for each process; returns 0, or 1 after one has failed.

    All are stopped after the first failure.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, __file__, *sys.argv[1:], "--coordinator", address]
    running = [
        subprocess.Popen([*command, "--process", str(i)]) for i in range(num_processes)
    ]
    try:
        while True:
            codes = [process.poll() for process in running]
            if any(codes) or None not in codes:
                return int(any(codes))
            time.sleep(0.1)
    finally:
        for process in running:
            process.kill()


def main():
    """Runs the script."""
    parser = argparse.ArgumentParser(description="Private training by processes.")
    parser.add_argument("--processes", type=int, default=2, help="local processes")
    parser.add_argument("--devices", type=int, default=1, help="CPUs of a process")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--checkpoints", help="a directory, to go on after a failure")
    parser.add_argument("--output", type=pathlib.Path, help="an .npz file to write")
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.coordinator is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        _join(args.coordinator, args.processes, args.process)
    elif args.processes < 1 or args.devices < 1:
        sys.exit("--processes and --devices must be at least 1.")
    elif not is_in_a_cluster():
        sys.exit(start_locally(args.processes))
    report(*train(args.steps, args.checkpoints), args.output)


if __name__ == "__main__":
    main()
