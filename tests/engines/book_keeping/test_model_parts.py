"""Parts of real models that once had no rule of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpmp

BATCH, LENGTH, WIDTH, GROUPS = 4, 6, 8, 3
POSITIONS = jnp.arange(LENGTH)
RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


TOKENS = jnp.asarray(RNG.integers(9, size=(BATCH, LENGTH)), jnp.int32)
IMAGES = normal(BATCH, WIDTH, 2, 2)
ROWS = normal(BATCH, LENGTH, WIDTH)


def embedded(ids):
    """Adds rows of a table, at indices that the program knows, to those of tokens."""
    params = {"tokens": normal(9, WIDTH), "table": normal(2 * LENGTH, WIDTH)}

    def loss(params, tokens):
        added = jnp.take(params["table"], ids(), axis=0, mode="clip")
        x = params["tokens"][tokens] + added
        return jnp.mean(jnp.tanh(x) ** 2)

    return params, loss, TOKENS


def scaled_by_group_norm():
    """As in Equinox: broadcast to the shape of an example, then once more by vmap."""
    params = {"scale": normal(WIDTH), "bias": normal(WIDTH)}

    def one(params, x):
        def as_image(w):
            return jnp.broadcast_to(w[:, None, None], x.shape)

        return as_image(params["scale"]) * x + as_image(params["bias"])

    def loss(params, images):
        made = jax.vmap(one, in_axes=(None, 0))(params, images)
        return jnp.mean(jnp.sin(made))

    return params, loss, IMAGES


def with_penalty_off():
    params = {"w": normal(WIDTH, 3)}

    def loss(params, x):
        penalty = sum(jnp.sum(w**2) for w in jax.tree.leaves(params))
        return jnp.mean(jnp.tanh(x @ params["w"])) + 0.0 * penalty

    return params, loss, ROWS


def experts(*, in_scan=False):
    """A mixture of experts that multiplies the rows of each expert by its matrix."""
    params = {"up": normal(GROUPS, WIDTH, WIDTH), "out": normal(WIDTH, 2)}
    router = normal(WIDTH, GROUPS)

    def layer(params, x):
        expert = jnp.argmax(x @ router, axis=-1)
        order = jnp.argsort(expert)
        sizes = jnp.bincount(expert, length=GROUPS).astype(jnp.int32)
        hidden = jax.nn.relu(jax.lax.ragged_dot(x[order], params["up"], sizes))
        return hidden[jnp.argsort(order)]

    def loss(params, x):
        x = x.reshape(-1, WIDTH)
        if in_scan:
            x, _ = jax.lax.scan(lambda x, _: (layer(params, x), None), x, length=2)
        else:
            x = layer(params, x)
        return jnp.mean((x @ params["out"]) ** 2)

    return params, loss, ROWS


PARTS = {
    "positions": lambda: embedded(lambda: jnp.arange(LENGTH)[None]),
    "every other position, backwards": lambda: embedded(
        lambda: 2 * jnp.arange(LENGTH)[::-1]
    ),
    "one type for all": lambda: embedded(lambda: jnp.zeros(LENGTH, jnp.int32)),
    "irregular": lambda: embedded(lambda: jnp.array([3, 1, 4, 0, 5, 9])),
    "repeated": lambda: embedded(lambda: jnp.array([3, 1, 4, 1, 5, 9])),
    "from outside": lambda: embedded(lambda: POSITIONS),
    "rounded on the way": lambda: embedded(
        lambda: (256 + jnp.arange(LENGTH)).astype(jnp.bfloat16).astype(jnp.int32) - 256
    ),
    "group norm": scaled_by_group_norm,
    "penalty off": with_penalty_off,
    "experts": experts,
    "experts in a scan": lambda: experts(in_scan=True),
}


def rules_of(name):
    params, loss, batch = PARTS[name]()
    rows = dpmp.book_keeping.summarize(loss, params, batch).rows
    return {row.path: row.rules for row in rows}


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("positions", {"['table']": ("add",), "['tokens']": ("gather",)}),
        ("every other position, backwards", {"['table']": ("add",)}),
        ("one type for all", {"['table']": ("gather",)}),
        ("repeated", {"['table']": ("gather",)}),
        ("from outside", {"['table']": ("add",)}),
        ("rounded on the way", {"['table']": ("gather",)}),
        ("group norm", {"['scale']": ("mul",), "['bias']": ("add",)}),
        ("penalty off", {"['w']": ("dot",)}),
        ("experts", {"['up']": ("dot",), "['out']": ("dot",)}),
    ],
)
def test_parts_have_rules_of_their_own(name, rules):
    found = rules_of(name)
    assert {path: found[path] for path in rules} == rules


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize(
    ("method", "arithmetic"),
    [
        ("book_keeping", "unproved_float32"),
        ("book_keeping", "bounded"),
        ("per_example", "float32"),
    ],
)
def test_norms_and_sums_are_those_of_gradients_one_by_one(name, method, arithmetic):
    params, loss, batch = PARTS[name]()
    grad = jax.jit(jax.grad(loss))
    grads = [grad(params, batch[i : i + 1]) for i in range(BATCH)]
    norms = [
        np.sqrt(sum(np.sum(np.float64(x) ** 2) for x in jax.tree.leaves(g)))
        for g in grads
    ]
    clipped_grad = dpmp.clipped_grad(
        loss,
        l2_clip_norm=100 * max(norms),
        method=method,
        arithmetic=arithmetic,
        return_grad_norms=True,
    )
    sums, sensitive = jax.jit(lambda *args: clipped_grad(*args))(params, batch)
    np.testing.assert_allclose(sensitive.grad_norms, norms, rtol=1e-5)
    expected = jax.tree.map(lambda *x: np.sum(np.float64(x), axis=0), *grads)
    for path, total in jax.tree_util.tree_leaves_with_path(expected):
        got = sums[path[0].key]
        got = got.to_float() if isinstance(got, dpmp.GridArray) else got
        unit = 100 * max(norms) / 2**22 if arithmetic == "bounded" else 1e-5
        np.testing.assert_allclose(got, total, atol=unit * BATCH, rtol=1e-5)
