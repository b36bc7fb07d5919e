"""Privacy for a person who owns many records.

    python examples/user_level.py

DP-SGD protects one example, that is one row of the dataset. If a person owns many rows,
a small epsilon for a row says little about the person: whoever compares the model with
and without a person compares datasets that differ in all rows of this person. The
remedy is to make one row of all records of a person. The loss is then the mean over the
records of one person, so that clipping bounds what the whole person contributes.

The script makes up 3,000 people with many or few records, of which up to 20 are used,
and predicts the label of a record. It trains with one row for each person, with one row
for each record, and without privacy, 5 times each. The accuracy is that on the records
of 500 other people:

            accuracy  epsilon of a row  of a person
      0.825 +- 0.001              2.00         2.00  one row per person
      0.823 +- 0.001              2.00        91.20  one row per record
      0.825 +- 0.002               inf          inf  without privacy

This takes 13 seconds of processor time, or 9 if the programs have been compiled before
(JAX_COMPILATION_CACHE_DIR keeps them). The noise differs each time: an earlier
call printed 0.824 for rows of people.

The last column is the epsilon of a person with 20 records. With rows of records, it
follows from how many of these records are in a batch, a binomial number (Charles et
al., https://arxiv.org/abs/2407.07737; the limit on the size of a batch is left out). An
epsilon of 91 promises nothing in practice. The protection of people costs no accuracy
here, because 3,000 people are many for a model with 11 parameters. Do not expect that
of fewer people or larger models.

The repetitions and the runs without privacy are for data that are made up: an epsilon
is that of one run, and each run on the same people costs as much again.

For your own data, replace `make_records`, train once, and choose `MOST_RECORDS`. The
other records of a person are ignored. Which ones these are may depend on this person,
but not on other people. Choose a delta below 1 / number of people.
"""

import argparse

import dp_accounting.pld
import jax.numpy as jnp
import numpy as np
import optax
import scipy.stats

import dpmp

NUM_PEOPLE, NUM_HELD_OUT, NUM_FEATURES = 3000, 500, 10
MOST_RECORDS = 20  # of one person


def make_records(first, num_people):
    """A table with a row for each record; people are numbered from 0.

    Some people have one record and others have many. The records of one person have
    more in common than those of different people.
    """
    rng = np.random.default_rng(first)
    weights = np.random.default_rng(0).normal(size=NUM_FEATURES)
    num_records = np.minimum(rng.geometric(0.1, num_people), 3 * MOST_RECORDS)
    person = np.repeat(np.arange(num_people), num_records)
    tastes = rng.normal(size=(num_people, NUM_FEATURES))
    moods = rng.normal(size=num_people)
    x = tastes[person] + rng.normal(size=(len(person), NUM_FEATURES))
    logits = x @ weights + moods[person]
    y = rng.random(len(person)) < 1 / (1 + np.exp(-logits))
    return {"person": person, "x": x.astype(np.float32), "y": y.astype(np.float32)}


def one_row_per_person(records, num_people):
    """Arrays with a row for each person, padded to `MOST_RECORDS` records."""
    person = records["person"]
    order = np.argsort(person, kind="stable")
    first = np.searchsorted(person[order], person[order])
    place = np.arange(len(order)) - first  # among the records of the same person
    kept = place < MOST_RECORDS
    index = person[order][kept], place[kept]
    shape = num_people, MOST_RECORDS
    x, y = np.zeros((*shape, NUM_FEATURES), np.float32), np.zeros(shape, np.float32)
    is_record = np.zeros(shape, bool)
    x[index] = records["x"][order][kept]
    y[index] = records["y"][order][kept]
    is_record[index] = True
    return {"x": x, "y": y, "is_record": is_record}


def one_row_per_record(people):
    """The same records, in rows of one record each. It protects records, not people."""
    is_record = people["is_record"]
    return {name: column[is_record][:, None] for name, column in people.items()}


def logits_of(params, x):
    """The logarithm of the odds of label 1."""
    return x @ params["weights"] + params["bias"]


def loss_fn(params, row):
    """The mean loss over the records of one row; (1, MOST_RECORDS, ...) of a person."""
    is_record = row["is_record"]
    # The padding is replaced by zeros before it is used: 0 * NaN would be NaN.
    x = jnp.where(is_record[..., None], row["x"], 0)
    losses = optax.sigmoid_binary_cross_entropy(logits_of(params, x), row["y"])
    num_records = jnp.maximum(jnp.sum(is_record), 1).astype(losses.dtype)
    return jnp.sum(jnp.where(is_record, losses, 0)) / num_records


def make_mechanism(num_rows, epsilon, delta):
    """Describes a run that protects one row. A tenth of all rows is in a batch."""
    return dpmp.DPSGD(
        num_examples=num_rows,
        expected_batch_size=num_rows // 10,
        iterations=100,
        l2_clip_norm=0.5,
        rescale_to_unit_norm=True,
        num_parameters=NUM_FEATURES + 1,
    ).calibrate(epsilon=epsilon, delta=delta)


def epsilon_of_a_person(mechanism, num_records):
    """The epsilon of a person who owns several rows."""
    # How many of these rows are in a batch is random. Each adds one clip norm at most.
    in_batch = list(range(num_records + 1))
    prob = mechanism.sampling_prob
    step = dp_accounting.dp_event.MixtureOfGaussiansDpEvent(
        mechanism.noise_multiplier,
        in_batch,
        scipy.stats.binom.pmf(in_batch, num_records, prob).tolist(),
    )
    accountant = dp_accounting.pld.PLDAccountant(
        mechanism.neighboring_relation,
        value_discretization_interval=5e-3,  # coarse, rounded up, and fast
    )
    accountant.compose(step, mechanism.iterations)
    return accountant.get_epsilon(mechanism.delta)


def accuracies(mechanism, rows, held_out, num_runs):
    """Trains several times; returns the accuracies on records of other people."""
    trainer = dpmp.DPTrainer(
        mechanism=mechanism, loss_fn=loss_fn, optimizer=optax.sgd(1.0), policy="float32"
    )
    found = []
    for _ in range(num_runs):
        params = {"weights": jnp.zeros(NUM_FEATURES), "bias": jnp.zeros(())}
        params = trainer.fit(trainer.init(params), rows, progress=False).params
        is_right = (logits_of(params, held_out["x"]) > 0) == (held_out["y"] == 1)
        found.append(np.mean(is_right))
    return np.array(found)


def main():
    """Trains in three ways, and prints accuracies and guarantees."""
    parser = argparse.ArgumentParser(description="Privacy for owners of many records.")
    parser.add_argument("--epsilon", type=float, default=2.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    if args.runs < 2:
        parser.error(f"--runs must be at least 2, to compare runs; got {args.runs}")

    people = one_row_per_person(make_records(1, NUM_PEOPLE), NUM_PEOPLE)
    records = one_row_per_record(people)
    held_out = make_records(2, NUM_HELD_OUT)
    by_person = make_mechanism(len(people["y"]), args.epsilon, args.delta)
    by_record = make_mechanism(len(records["y"]), args.epsilon, args.delta)
    print(by_person.statement())
    print(f"- Here, an example is a person with up to {MOST_RECORDS} records.")
    print(f"\n{'accuracy':>16}  {'epsilon of a row':>16}  {'of a person':>11}")
    ways = {
        "one row per person": (by_person, people, 1),
        "one row per record": (by_record, records, MOST_RECORDS),
        "without privacy": (by_person.without_privacy(), people, 1),
    }
    for name, (mechanism, rows, num_rows) in ways.items():
        found = accuracies(mechanism, rows, held_out, args.runs)
        row = person = mechanism.guarantee().epsilon if mechanism.is_private else np.inf
        if num_rows > 1:
            person = epsilon_of_a_person(mechanism, num_rows)
        accuracy = f"{found.mean():.3f} +- {found.std(ddof=1):.3f}"
        print(f"{accuracy:>16}  {row:16.2f}  {person:11.2f}  {name}")


if __name__ == "__main__":
    main()
