import jax
import jax.numpy as jnp
import pytest

from dpmp import GridArray, clipped_fun, clipped_grad
from dpmp.numerics._double_words import DoubleWord
from dpmp.numerics._grid import LARGEST_RESOLUTION


def loss(w, x):
    return jnp.mean((x @ w) ** 2)


ARGS = (jnp.ones(3), jnp.ones((4, 3)))


@pytest.mark.parametrize(
    ("arithmetic", "kind"),
    [
        (None, GridArray),
        ("bounded", GridArray),
        ("unproved_float32", jax.Array),
        ("unproved_float32x2", DoubleWord),
    ],
)
def test_book_keeping_sums_in_every_arithmetic_but_exact(arithmetic, kind):
    fn = clipped_grad(
        loss, l2_clip_norm=1.0, method="book_keeping", arithmetic=arithmetic
    )
    assert isinstance(jax.jit(fn.__call__)(*ARGS), kind)


def test_bounded_sums_have_the_finest_grid_unless_told_otherwise():
    for resolution in (None, 5000):
        fn = clipped_grad(
            loss,
            l2_clip_norm=3.0,
            method="book_keeping",
            arithmetic="bounded",
            resolution=resolution,
        )
        unit = jax.jit(fn.__call__)(*ARGS).unit
        assert unit == pytest.approx(3 / (resolution or LARGEST_RESOLUTION))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        *(
            ({"method": "book_keeping", "arithmetic": x}, f'"{x}" sums must .*example')
            for x in ("exact", "float32", "float32x2", "float64")
        ),
        ({"arithmetic": "bounded"}, '"bounded" sums must .*book_keeping'),
        (
            {"method": "book_keeping", "dtype": jnp.float32},
            r'"float32" sums must .*"bounded" sums there.*"unproved_float32"',
        ),
        (
            {
                "method": "book_keeping",
                "arithmetic": "unproved_float32",
                "dtype": jnp.float64,
            },
            "dtype must be that of float sums",
        ),
        (
            {"method": "book_keeping", "nan_safe": False},
            r"nan_safe=True.*unproved_float32",
        ),
        ({"arithmetic": "unproved_float32"}, "with method=.book_keeping."),
        (
            {"method": "book_keeping", "pre_clipping_transform": lambda x: x},
            "pre_clipping_transform needs",
        ),
        (
            {"arithmetic": "exact", "dtype": jnp.float32},
            "dtype must be that of float sums",
        ),
        ({"resolution": 100}, "resolution goes with sums on a grid"),
    ],
)
def test_what_does_not_go_together_is_refused(options, match):
    with pytest.raises(ValueError, match=match):
        clipped_grad(loss, l2_clip_norm=1.0, **options)


def test_functions_without_gradients_have_no_bounded_sums():
    with pytest.raises(
        ValueError, match='"bounded" sums must be used with method="book_keeping"'
    ):
        clipped_fun(lambda x: x, l2_clip_norm=1.0, arithmetic="bounded")


def test_a_grid_too_coarse_for_the_parameters_is_refused():
    fn = clipped_grad(
        loss,
        l2_clip_norm=1.0,
        method="book_keeping",
        arithmetic="bounded",
        resolution=30,
    )
    with pytest.raises(ValueError, match="fine enough to round 3 entries"):
        fn(*ARGS)


def test_clip_norms_that_are_no_prefix_are_refused_before_tracing():
    fn = clipped_grad(loss, l2_clip_norm={"a": 1.0}, method="book_keeping")
    with pytest.raises(ValueError, match="prefix of the clipped tree"):
        fn(*ARGS)
