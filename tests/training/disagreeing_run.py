"""One of two processes of a job that differ.

disagreeing_run.py ADDRESS PROCESS [CASE ...] prints how each attempt ends.
"""

import sys

import jax


def main(address, process, names):
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, process)
    import jax.numpy as jnp
    import numpy as np
    import optax
    from small_runs import DATA, KEY, PARAMS, loss_fn, new_trainer  # makes arrays

    auto = (jax.sharding.AxisType.Auto,) * 2
    rows = jax.NamedSharding(jax.make_mesh((4,), ("data",), auto[:1]), jax.P("data"))
    # Each process has all rows of a batch.
    devices = np.array(jax.devices()).reshape(2, 2).T
    mesh = jax.sharding.Mesh(devices, ("data", "model"), axis_types=auto)
    whole = jax.NamedSharding(mesh, jax.P("data"))
    everywhere = jax.NamedSharding(mesh, jax.P())
    # The second process has its devices in another order.
    order = np.array(jax.devices())[[0, 1, 3, 2] if process else [0, 1, 2, 3]]
    swapped = jax.sharding.Mesh(order, ("data",), axis_types=auto[:1])
    alone = jax.NamedSharding(
        jax.sharding.Mesh(jax.local_devices(), ("data",)), jax.P("data")
    )
    other_data = {name: x + process for name, x in DATA.items()}
    frozen = np.full(3, process, np.float32)
    other_params = {"w": PARAMS["w"] + process}

    def fit(params=PARAMS, data=DATA, sharding=rows, trainer=None, **options):
        trainer = trainer or new_trainer(microbatch_size=4)
        options = {"batch_sharding": sharding, "progress": False} | options
        state = trainer.fit(trainer.init(params), data, **options)
        return np.asarray(state.params["w"])

    def trainer_of(**fields):
        return new_trainer(microbatch_size=4, **fields)

    def step(trainer=None):
        trainer = trainer or trainer_of()
        state = trainer.init(PARAMS)
        batch = trainer.load_batch(state, DATA, batch_sharding=rows)
        return np.asarray(trainer.train_step(state, batch).params["w"])

    def second_step(params=None):
        trainer = trainer_of()
        state = trainer.init(PARAMS)
        batch = trainer.load_batch(state, DATA, batch_sharding=whole)
        state = trainer.train_step(state, batch)
        if params is not None:
            make = jax.make_array_from_process_local_data
            params = {"w": make(everywhere, params["w"], (3,))}
            state = state._replace(params=params)
        batch = trainer.load_batch(state, DATA, batch_sharding=whole)
        return np.asarray(trainer.train_step(state, batch).params["w"])

    def step_of_own_rows():
        trainer = trainer_of()
        size = trainer.mechanism.padded_batch_size
        batch = {name: x[:size] for name, x in other_data.items()}
        make = jax.make_array_from_process_local_data
        batch, mask = (
            jax.tree.map(lambda x: make(whole, x, x.shape), y)
            for y in (batch, np.zeros(size, bool))
        )
        return trainer.train_step(trainer.init(PARAMS), batch, mask)

    def loss_with_callback(params, batch):
        jax.debug.callback(lambda: None)
        return (1 + process) * loss_fn(params, batch)

    def loss_with_key(params, batch):
        words = jax.random.key_data(own_key)
        return loss_fn(params, batch) + jnp.sum(words.astype(jnp.float32))

    own_key = jax.random.key(process)

    def step_of_arrays():
        trainer = trainer_of()
        size = trainer.mechanism.padded_batch_size
        batch = {name: x[:size] for name, x in DATA.items()}
        return trainer.train_step(trainer.init(PARAMS), batch, np.zeros(size, bool))

    rates = jnp.linspace(1.0, 2.0 + process, 64)
    closing = optax.stateless(
        lambda updates, _: jax.tree.map(lambda x: -x * jnp.mean(rates), updates)
    )

    cases = {
        "frozen key": lambda: fit(trainer=trainer_of(loss_fn=loss_with_key)),
        "same": fit,
        "whole": lambda: fit(sharding=whole),
        "step": step,
        "second step": second_step,
        "second params": lambda: second_step(params=other_params),
        "own rows": step_of_own_rows,
        "callback": lambda: fit(trainer=trainer_of(loss_fn=loss_with_callback)),
        "order": lambda: fit(sharding=jax.NamedSharding(swapped, jax.P("data"))),
        "alone": lambda: fit(sharding=alone),
        "arrays": step_of_arrays,
        "params": lambda: fit(other_params),
        "data": lambda: fit(data=other_data),
        "stop": lambda: fit(stop_at=2 + process),
        "key": lambda: fit(trainer=trainer_of(prng_key=KEY if process else None)),
        "noise": lambda: step(trainer=trainer_of(noise_multiplier=1.0 + process)),
        "closure": lambda: step(trainer=trainer_of(optimizer=closing)),
        "loss": lambda: fit(
            trainer=trainer_of(loss_fn=lambda *args: (1 + process) * loss_fn(*args))
        ),
        "frozen": lambda: fit(
            sharding=whole,
            trainer=trainer_of(
                loss_fn=lambda params, batch: (
                    loss_fn(params, batch) + params["w"] @ frozen
                )
            ),
        ),
    }
    for name in names or cases:
        try:
            result = cases[name]().tobytes().hex()
        except ValueError as error:
            result = f"ValueError {str(error).split(';')[0]}"
        # Other threads may have begun a line.
        print(f"\ncase : {name} : {result}\n", end="", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
