"""The privacy of synthetic texts: training and two histograms in one guarantee."""

import argparse
import dataclasses
import functools
import pathlib
from typing import Any, NamedTuple

import finetuning
import jax.numpy as jnp
import llm
import numpy as np
import optax
import synthetic_measures as measures

import dpmp
from dpmp import accounting, lora

SHARE_OF_COUNTS = 1 / 16  # of epsilon; the rest is for training

# The gradient of a record is minus one in the entry of its class, and zero elsewhere.
COUNTING: dict[str, Any] = {
    "loss_fn": lambda counts, batch: -jnp.sum(counts * batch["is_of_class"]),
    "optimizer": optax.sgd(1.0),
    "policy": "float32",
}


class Plan(NamedTuple):
    """Two mechanisms that share epsilon and delta, and the folder of their ledgers.

    Each has a half of delta, and their epsilons are added up, as the ledger does it.
    """

    counting: dpmp.DPSGD  # two histograms of all records
    training: dpmp.DPSGD
    delta: float  # of both together
    folder: pathlib.Path

    @classmethod
    def of(cls, args: argparse.Namespace, num_examples: int, size: int) -> "Plan":
        """The plan that the command line asks for, to train `size` parameters."""
        finetuning.check_delta(args.delta, num_examples)
        counting = dpmp.DPSGD(
            num_examples=num_examples,
            expected_batch_size=num_examples,
            iterations=2,
            l2_clip_norm=1.0,
            num_parameters=max(len(args.labels), len(measures.RUNS) + 1),
            method="per_example",  # its sums of ones are exact
        )
        training = dpmp.DPSGD(
            num_examples=num_examples,
            expected_batch_size=min(args.batch_size, max(1, num_examples // 4)),
            iterations=args.steps,
            l2_clip_norm=args.l2_clip_norm,
            num_parameters=size,
        )
        for_counts, half = SHARE_OF_COUNTS * args.epsilon, args.delta / 2
        return cls(
            counting.calibrate(epsilon=for_counts, delta=half),
            training.calibrate(epsilon=args.epsilon - for_counts, delta=half),
            args.delta,
            args.output / "privacy",
        )

    def trainer(self, mechanism: dpmp.DPSGD, **options: Any) -> dpmp.DPTrainer:
        """A trainer whose ledger has the delta of the whole plan."""
        mechanism = dataclasses.replace(mechanism, delta=self.delta)
        # Without a key the noise comes from the operating system: --seed, which anyone
        # can guess, is for what is public.
        return dpmp.DPTrainer(mechanism=mechanism, **options)

    def histogram(
        self, classes: np.ndarray, num_classes: int, name: str, after: Any = None
    ) -> tuple[np.ndarray, Any]:
        """Counts the records of each class, with noise.

        One step of gradient descent on all records does this.

        Args:
          classes: the class of each record, from 0.
          num_classes: the number of classes.
          name: of the folder with the ledger.
          after: for the second histogram, the states of the first and of training.

        Returns:
          The noisy counts, and the state, which has the privacy cost of all steps.
        """
        trainer = self.trainer(self.counting, **COUNTING)
        state = trainer.init(jnp.zeros(num_classes))
        if after is not None:
            first, trained = after
            state = state._replace(step=first.step, spent=trained.spent)
        data = {"is_of_class": np.eye(num_classes, dtype=np.float32)[classes]}
        options = {"checkpoint_dir": self.folder / name, "progress": False}
        state = trainer.fit(state, data, stop_at=int(state.step) + 1, **options)
        return np.asarray(state.params) * self.counting.num_examples, state

    def train(
        self,
        model: llm.Pretrained,
        adapters: lora.Adapters,
        batch: llm.losses.Batch,
        learning_rate: float,
        after: Any = None,
    ) -> Any:
        """The state after DP-SGD with Adam on the factors.

        `after` is the state of the first histogram. Without it, the mechanism is used
        without privacy, and nothing is written.
        """
        is_private = after is not None
        mechanism = self.training if is_private else self.training.without_privacy()
        loss_fn = functools.partial(llm.mean_nats, model.apply)
        schedule = optax.linear_schedule(learning_rate, 0, mechanism.iterations)
        trainer = self.trainer(
            mechanism,
            loss_fn=lora.apply(loss_fn, model.params),
            optimizer=optax.adam(schedule, b2=0.99),
            policy="mixed_bfloat16",
        )
        state, folder = trainer.init(adapters), None
        if is_private:
            state, folder = state._replace(spent=after.spent), self.folder / "training"
        state = trainer.fit(state, batch, checkpoint_dir=folder)
        lora.check_trained(state.params, initial=adapters, params=model.params)
        return state

    def statement(self, num_held_out: int, num_planted: int, compare: bool) -> str:
        """The claim for all that is published, and the statement of training."""
        parts = [x.guarantee().epsilon for x in (self.counting, self.training)]
        total, counting, training = map(accounting.round_up, (sum(parts), *parts))
        text = (
            f"The texts and the counts together are ({total}, {self.delta:g})-"
            "differentially private.\n"
            "Two parts are added up, each with a half of delta:\n"
            f"- Counts: epsilon {counting} for two histograms of all records, by label "
            "and by the\n  longest run of words that a text shares. Each count has "
            f"noise of standard\n  deviation {self.stddev_of_counts:.1f}.\n"
            f"- Training: epsilon {training}. Its own statement is below.\n"
            f"- Held out: {num_held_out} records, used for evaluation only and treated "
            "as public.\n  The claim does not cover their losses, accuracies and "
            'shared runs, which the\n  report has under "not_protected".\n'
        )
        if num_planted:
            text += (
                f"- Planted: {num_planted} records are made up, to see what the model "
                "remembers.\n"
            )
        if compare:
            text += (
                "- Compared: a model and a classifier are also trained on the records "
                "without\n  privacy. All figures of them are published without any "
                'protection, under\n  "not_protected" as well.\n'
            )
        return f"{text}\n{self.training.statement()}\n"

    def epsilon(self, state: dpmp.TrainingState) -> float:
        """The epsilon of everything that led to a state."""
        return self.trainer(self.counting, **COUNTING).guarantee(state).epsilon

    @property
    def stddev_of_counts(self) -> float:
        """The standard deviation of the noise on each count."""
        return self.counting.stddev * self.counting.num_examples
