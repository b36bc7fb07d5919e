"""DPTrainer trains with a privacy mechanism, a loss and an optimizer.

>>> data = {"x": np.ones((100, 2), np.float32), "y": np.ones(100, np.float32)}
>>> def loss_fn(params, batch):
...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
>>> trainer = DPTrainer(
...     mechanism=DPSGD(
...         num_examples=100, expected_batch_size=20, iterations=2, l2_clip_norm=1.0
...     ).calibrate(epsilon=8.0, delta=1e-5),
...     loss_fn=loss_fn,
...     optimizer=optax.sgd(0.1),
...     policy=Policy.from_name("float32"),
... )
>>> state = trainer.init({"w": jnp.zeros(2)})
>>> state = trainer.fit(state, data, progress=False)
>>> print(state.step)
2

`fit` samples the batches, makes all steps and reports epsilon. `train_step` makes one
step.
"""

from dpmp.training._source import Source
from dpmp.training._state import SensitiveOutputs, TrainingState
from dpmp.training._trainer import DPTrainer

__all__ = ["DPTrainer", "SensitiveOutputs", "Source", "TrainingState"]
