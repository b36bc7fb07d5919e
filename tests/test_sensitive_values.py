"""No function shows a sensitive value that it cannot use, or that is out of range.

Every public function that takes data, sums or masks is called with values of many
kinds: first with an ordinary one, then with one that holds a secret. What the two calls
show must be the same: the error with its notes and causes, the warnings and the output.
NumPy is told to raise where it would warn.
"""

import contextlib
import functools
import io
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas
import pytest

import dpmp
from dpmp import book_keeping, lora, memory, planning
from dpmp.noise_addition import NoiseState, gaussian_privatizer
from dpmp.numerics import LARGEST_RESOLUTION, ExactSums

SIZE, PADDED, WIDTH = 24, 8, 3
NUMBER, WORD = 7654321, "quetzalcoatlus"


class Lazy:
    """An array that another library has not loaded yet."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.array, dtype)

    def __len__(self):
        return len(self.array)

    def __getitem__(self, index):
        return Lazy(self.array[index])

    def __repr__(self):
        return f"Lazy({self.array})"


def rows(size, dtype=np.float32):
    return (np.arange(size * WIDTH).reshape(size, WIDTH) % 5).astype(dtype)


def changed(array, secret):
    secrets = secret if isinstance(secret, tuple) else (secret,)
    for row, x in enumerate(secrets, 3):
        array[row, 1] = x
    return array


def of_dtype(dtype, *secrets):
    """An ordinary array of this dtype, and one for each secret that stands in it.

    A tuple of secrets stands in one array.
    """
    makers = [lambda size, x=x: changed(rows(size, dtype), x) for x in secrets]
    return [lambda size: rows(size, dtype), *makers]


def built(build, ordinary, *secrets):
    """What `build` makes of rows with an ordinary value, and with each secret."""
    return [
        lambda size, x=x: build(changed(rows(size, object), x))
        for x in (ordinary, *secrets)
    ]


def column(dtype, ordinary, secret):
    """A column of pandas, all of one value but for the fourth."""
    return [
        lambda size, x=x: pandas.Series([ordinary] * 3 + [x] * (size - 3), dtype=dtype)
        for x in (ordinary, secret)
    ]


FLOATS = functools.partial(np.asarray, dtype=float)
# By kind: makes an ordinary value with a number of rows; makes values with a secret.
KINDS = {
    "float32": of_dtype(np.float32, (NUMBER, 1e-42), (np.nan, np.inf)),
    "float64": of_dtype(float, (7.654321e300, np.nan, 7.654321e-300)),
    "int64": of_dtype(np.int64, (NUMBER * 10**9, -NUMBER)),
    "uint64": of_dtype(np.uint64, 2**64 - 1),
    "complex128": of_dtype(complex, 7.654321e300j),
    "longdouble": of_dtype(np.longdouble, NUMBER),
    "text": of_dtype("U30", WORD),
    "bytes": of_dtype("S30", WORD),
    "texts of any length": built(
        lambda x: x.astype(str).astype(np.dtypes.StringDType()), "", WORD
    ),
    "objects": of_dtype(object, WORD, None, np.nan, NUMBER * 10**40),
    "dates": of_dtype("M8[s]", np.datetime64("7654-03-21")),
    "records": [
        lambda size, x=x: np.array([(x, "a")] * size, [("age", float), ("name", "U9")])
        for x in (1.0, NUMBER)
    ],
    "masked": built(lambda x: np.ma.masked_equal(FLOATS(x), 2.0), 2.0, NUMBER),
    "lists": built(lambda x: x.tolist(), 1.0, float(NUMBER)),
    "lists of two lengths": [
        lambda size, x=x: [*rows(size - 1).tolist(), [x] * 2]
        for x in (1.0, float(NUMBER))
    ],
    "lists of texts": built(lambda x: x.astype(str).tolist(), "1.0", WORD),
    "lists of arrays": built(lambda x: list(FLOATS(x)), 1.0, 7.654321e300),
    "lazy": [lambda size, f=f: Lazy(f(size)) for f in of_dtype(float, 7.654321e300)],
    "lazy texts": [lambda size, f=f: Lazy(f(size)) for f in of_dtype("U30", WORD)],
    "one number": [lambda _: 1.0, lambda _: 7.654321e300],
    "one text": [lambda _: "1.0", lambda _: WORD],
    "table": built(lambda x: pandas.DataFrame(FLOATS(x)), 1.0, (7.654321e300, np.nan)),
    "categories": column("category", "a", WORD),
    "nullable": column("Int64", 1, NUMBER),
}

NO_NUMBERS = {"longdouble", "text", "bytes", "texts of any length", "objects", "dates"}
NO_NUMBERS |= {"records", "masked", "lists of texts", "lazy texts", "one text"}

PARAMS = {"w": jnp.ones(WIDTH)}
BATCH = rows(PADDED)
BASE = {"w": jnp.ones((WIDTH, 2))}


def loss(params, batch):
    x = batch["x"]
    return jnp.mean((x.reshape(-1, x.size) @ jnp.resize(params["w"], x.size)) ** 2)


def loss_with_adapters(params, batch):
    return jnp.sum(batch["x"] @ params["w"])


@functools.cache
def trainer():
    return dpmp.DPTrainer(
        mechanism=dpmp.DPSGD(
            num_examples=SIZE,
            expected_batch_size=4,
            truncated_batch_size=PADDED,
            iterations=2,
            l2_clip_norm=1.0,
            noise_multiplier=1.0,
            delta=1e-5,
        ),
        loss_fn=loss,
        optimizer=optax.sgd(0.1),
        policy="float32",
        prng_key=jax.random.key(3),
    )


def fit(make):
    trainer().fit(trainer().init(PARAMS), {"x": make(SIZE)}, progress=False)


def train_step(batch, mask):
    trainer().train_step(trainer().init(PARAMS), {"x": batch}, mask)


@functools.cache
def adapters():
    return lora.init(jax.random.key(0), BASE, 2, "w")


clipped = functools.partial(dpmp.clipped_grad, loss, l2_clip_norm=1.0)
clipped_sum = dpmp.clipped_fun(lambda batch: batch["x"] * 1.0, l2_clip_norm=1.0)
with_shared = dpmp.clipped_grad(lambda p, b, other=None: loss(p, b), l2_clip_norm=1.0)
for_memory = {"policy": "float32", "optimizer": optax.sgd(0.1)}

# What takes a sensitive value, and calls with one: of the data, unless the name says
# another thing. `make` makes the value with a number of rows.
CALLS = {
    "fit": fit,
    "train_step": lambda make: train_step(make(PADDED), np.zeros(PADDED, bool)),
    "train_step, mask": lambda make: train_step(BATCH, make(PADDED)),
    "load_batch": lambda make: trainer().load_batch(
        trainer().init(PARAMS), {"x": make(SIZE)}
    ),
    "lower": lambda make: trainer().lower(trainer().init(PARAMS), {"x": make(PADDED)}),
    "check_source": lambda make: dpmp.check_source({"x": make(SIZE)}),
    "clipped_grad": lambda make: clipped()(PARAMS, {"x": make(PADDED)}),
    "clipped_grad, book-keeping": lambda make: clipped(method="book_keeping")(
        PARAMS, {"x": make(PADDED)}
    ),
    "clipped_grad, mask": lambda make: clipped()(
        PARAMS, {"x": BATCH}, is_padding_example=make(PADDED)
    ),
    "clipped_grad, shared": lambda make: with_shared(
        PARAMS, {"x": BATCH}, make(PADDED)
    ),
    "clipped_grad, keyword": lambda make: with_shared(
        PARAMS, {"x": BATCH}, other=make(PADDED)
    ),
    "microbatch_size": lambda make: clipped().microbatch_size(
        PARAMS, {"x": make(PADDED)}
    ),
    "clipped_fun": lambda make: clipped_sum({"x": make(PADDED)}),
    "clip_pytree": lambda make: dpmp.clip_pytree({"x": make(PADDED)}, 1.0),
    "clip_pytree, return_zero": lambda make: dpmp.clip_pytree(
        BATCH, 1.0, return_zero=make(PADDED)
    ),
    "privatizer, sum": lambda make: gaussian_privatizer(
        stddev=1.0, prng_key=jax.random.key(0)
    ).update({"x": make(PADDED)}, NoiseState(jax.random.key(0), jnp.int32(0))),
    "tune": lambda make: planning.tune(
        trainer(), PARAMS, {"x": make(PADDED)}, sizes=(PADDED,), rounds=1
    ),
    "compiled_memory": lambda make: memory.compiled_memory(
        loss, PARAMS, {"x": make(PADDED)}, **for_memory
    ),
    "estimate_memory": lambda make: memory.estimate_memory(
        PARAMS, {"x": make(PADDED)}, **for_memory
    ),
    "summarize": lambda make: book_keeping.summarize(loss, PARAMS, {"x": make(PADDED)}),
    "condition numbers": lambda make: book_keeping.measure_condition_numbers(
        loss, PARAMS, {"x": make(PADDED)}, microbatch_size=4
    ),
    "precision_report": lambda make: dpmp.precision_report(
        loss, PARAMS, {"x": make(PADDED)}
    ),
    "compare_policies": lambda make: dpmp.compare_policies(
        loss,
        PARAMS,
        {"x": make(PADDED)},
        mechanism=trainer().mechanism,
        optimizer=optax.sgd(0.1),
        policies=["mixed_bfloat16"],
    ),
    "autocast": lambda make: dpmp.autocast(loss)(PARAMS, {"x": make(PADDED)}),
    "lora.apply": lambda make: lora.apply(loss_with_adapters, BASE)(
        adapters(), {"x": make(PADDED)}
    ),
    "lora.init": lambda make: lora.init(
        jax.random.key(0),
        BASE,
        2,
        "w",
        fun=loss_with_adapters,
        example_args=({"x": make(PADDED)},),
    ),
}


def shown(call, make):
    """All that a call shows: error with notes and causes, warnings and output."""
    output, error = io.StringIO(), None
    with (
        warnings.catch_warnings(record=True) as caught,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        np.errstate(all="raise"),
    ):
        warnings.simplefilter("always")
        try:
            call(make)
        except Exception as raised:
            error = raised
    texts = [output.getvalue(), *sorted(str(x.message) for x in caught)]
    while error is not None:
        texts += [type(error).__name__, str(error), *getattr(error, "__notes__", ())]
        error = error.__cause__ or error.__context__
    return re.sub(r" at 0x[0-9a-f]+", "", "\n".join(texts))


COMPILED_OFTEN = {
    "clipped_grad, keyword",
    "clipped_grad, shared",
    "compare_policies",
    "compiled_memory",
    "lower",
    "train_step, mask",
    "tune",
}


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(x, marks=pytest.mark.slow if x in COMPILED_OFTEN else ())
        for x in CALLS
    ],
)
def test_a_secret_changes_nothing_of_what_is_shown(call):
    for kind, (ordinary, *secrets) in KINDS.items():
        expected = shown(CALLS[call], ordinary)
        is_used = "shared" not in call and "keyword" not in call
        assert not is_used or kind not in NO_NUMBERS or "RefusedError" in expected
        for make in secrets:
            text = shown(CALLS[call], make)
            assert str(NUMBER) not in text, (kind, text)
            assert "7.654" not in text, (kind, text)
            assert WORD not in text, (kind, text)
            assert text == expected, kind


def clipped_in_four(make):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        clipped(spmd_axis_name="data")(PARAMS, {"x": make(0)})


WRAPPING = ExactSums(LARGEST_RESOLUTION)
NO_PADDING = np.zeros(PADDED, bool)
# Calls with a batch that somebody forgot to pad.
UNPADDED = {
    "another mask": lambda make: clipped()(
        PARAMS, {"x": make(0)}, is_padding_example=NO_PADDING
    ),
    "another column": lambda make: clipped(method="book_keeping")(
        PARAMS, {"x": make(0), "y": BATCH}
    ),
    "clipped_fun": lambda make: clipped_sum(
        {"x": make(0)}, is_padding_example=NO_PADDING
    ),
    "microbatches": lambda make: clipped(microbatch_size=4)(PARAMS, {"x": make(0)}),
    "float sums": lambda make: clipped(microbatch_size=1, arithmetic="float32")(
        PARAMS, {"x": np.tile(make(0), (999, 1))}
    ),
    "wrapping sums": lambda make: clipped(arithmetic=WRAPPING)(
        PARAMS, {"x": np.tile(make(0), (200, 1))}
    ),
    "devices": clipped_in_four,
    "memory": lambda make: memory.estimate_memory(
        PARAMS, {"x": make(0)}, microbatch_size=4, **for_memory
    ),
    "train_step": lambda make: train_step(make(0), NO_PADDING),
    "lower": lambda make: trainer().lower(
        trainer().init(PARAMS), {"x": make(0), "y": BATCH}
    ),
}


@pytest.mark.parametrize("call", UNPADDED)
def test_the_number_of_drawn_examples_is_not_shown(call):
    texts = [shown(UNPADDED[call], lambda _, n=n: rows(n)) for n in (5, 7)]
    assert "RefusedError" in texts[0] or "can exceed" in texts[0]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("is_jit_disabled", [False, True])
def test_flags_for_debugging_do_not_look_at_what_is_clipped(is_jit_disabled):
    x = np.array([[np.nan, np.inf, 1.0]])
    flags = jax.debug_nans(True), jax.debug_infs(True)
    with flags[0], flags[1], jax.disable_jit(is_jit_disabled):
        dpmp.clip_pytree({"x": x}, 1.0)
        clipped()(PARAMS, {"x": x})
        clipped(method="book_keeping")(PARAMS, {"x": x})
        clipped_sum({"x": x})
        lora.init(jax.random.key(0), BASE, 2, "w")
