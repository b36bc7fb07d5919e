"""A short run with a directory, to be killed: python killed_run.py DIR RESULT."""

import hashlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpmp

SIZE = 64


class Source:
    """Takes some time for each batch, so that the run can be killed at many places."""

    def __len__(self):
        return SIZE

    def __getitem__(self, indices):
        time.sleep(0.01)
        rows = np.random.default_rng(0).normal(size=(SIZE, 4)).astype(np.float32)
        return {"x": rows[indices], "y": rows[indices].sum(axis=1)}


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def main(directory, result):
    trainer = dpmp.DPTrainer(
        mechanism=dpmp.DPSGD(
            num_examples=SIZE,
            expected_batch_size=8,
            iterations=150,
            l2_clip_norm=1.0,
            noise_multiplier=2.0,
            delta=1e-3,
        ),
        loss_fn=loss_fn,
        optimizer=optax.adam(0.1),
        policy="float32",
    )
    key = jax.random.key(9)
    state = trainer.init_or_restore({"w": jnp.zeros(4)}, directory, prng_key=key)
    state = trainer.fit(
        state, Source(), checkpoint_dir=directory, every=10, progress=False
    )
    arrays = [np.asarray(x) for x in jax.tree.leaves((state.params, state.opt_state))]
    digest = hashlib.sha256(b"".join(x.tobytes() for x in arrays)).hexdigest()
    with open(result, "w") as file:
        file.write(digest)


if __name__ == "__main__":
    main(*sys.argv[1:])
