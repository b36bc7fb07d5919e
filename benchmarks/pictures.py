"""Draws the pictures of the guides, from the lines in results/ and from formulas.

pip install '.[bench,plot]'
python -m benchmarks.pictures                # writes docs/pictures/*.svg
python -m benchmarks.pictures formats plan

Their background is transparent and their text is grey, which can be read on white and
on black. docs/pictures/ also has the diagrams, which were drawn by hand.
"""

import argparse
import contextlib
import io
import itertools
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
from matplotlib.figure import Figure

import dpmp
import dpmp.__main__
from benchmarks import accuracy_tasks, needs
from benchmarks.figures import few_bits, selfcheck
from benchmarks.harness import mean_and_error
from benchmarks.markdown import read

OUTPUT = pathlib.Path(__file__).parents[1] / "docs" / "pictures"
BLUE, ORANGE, GREEN, GREY = "#2b8cc4", "#d55e00", "#009e73", "#76797e"
_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "dpmp",  # the same picture is the same file
    "savefig.transparent": True,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": "medium",
    "legend.frameon": False,
    "legend.fontsize": "small",
    "legend.labelcolor": GREY,
    "grid.alpha": 0.3,
}
_GREY = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color")
_STYLE |= dict.fromkeys((*_GREY, "ytick.color"), GREY)


def _panels(
    columns: int, height: float, *, rows: int = 1, width: float = 7.2, **options: Any
) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def _name_rows(axes: Any, names: Iterable[str]) -> None:
    """The names of rows, from top to bottom."""
    axes.set_yticks(range(len([*names])), labels=[*names])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()


def error_by_bands() -> Figure:
    """The error of correlated noise over that of independent noise, by bands."""
    figure, panels = _panels(3, 3.2, sharey=True)
    for axes, epsilon in zip(panels, (1.0, 3.0, 8.0), strict=True):
        for line in read("least_noise", "setting", epsilon=epsilon):
            one = line["error"]["1"]
            for field, color, style in (
                ("error", BLUE, "-"),
                ("of_inverse", ORANGE, "--"),
            ):
                bands = [int(x) for x in line[field]]
                shares = [x / one for x in line[field].values()]
                axes.plot(bands, shares, style, color=color, alpha=0.7)
        axes.set_xscale("log", base=2)
        axes.set_xticks([1, 2, 4, 8, 16], labels=["1", "2", "4", "8", "16"])
        axes.set(title=f"epsilon {epsilon:.0f}", xlabel="bands", ylim=(0, 1.3))
        axes.grid()
    panels[0].set_ylabel("error, over that of one band")
    panels[0].plot([], color=BLUE, label="bands")
    panels[0].plot([], "--", color=ORANGE, label="bands of the inverse")
    panels[0].legend(loc="lower left")
    return figure


def formats() -> Figure:
    """The sizes of the entries of gradients, over what formats can hold."""
    task = accuracy_tasks.digits()
    batch = jax.tree.map(lambda x: x[:256, None], task.train)
    grads = jax.vmap(jax.grad(task.loss_fn), (None, 0))(task.initial_params(0), batch)
    entries = np.abs(np.concatenate([np.ravel(x) for x in jax.tree.leaves(grads)]))
    exponents = np.log2(entries[entries > 0])

    ratios = (3, 2.4)
    figure, panels = _panels(1, 4.0, rows=2, sharex=True, height_ratios=ratios)
    top, bottom = panels
    bins = np.arange(-60, 20, 1.0)
    for shift, color, label in (
        (0, BLUE, "loss of an example"),
        (np.log2(task.loss_weight), ORANGE, "the same, in a mean over 4 million"),
    ):
        top.hist(exponents + shift, bins, color=color, alpha=0.6, label=label)
    top.set(yticks=[], ylabel="entries of gradients")
    top.spines.left.set_visible(False)
    top.legend(loc="upper left")

    kinds = {
        "float32, bfloat16": jnp.bfloat16,
        "float16": jnp.float16,
        "float8 e5m2": jnp.float8_e5m2,
        "float8 e4m3fn": jnp.float8_e4m3fn,
        "float4 e2m1fn": jnp.float4_e2m1fn,
    }
    for row, dtype in enumerate(kinds.values()):
        info = jnp.finfo(dtype)
        least, normal, most = (
            np.log2(float(x)) for x in (info.smallest_subnormal, info.tiny, info.max)
        )
        bottom.barh(row, normal - least, left=least, color=GREY, alpha=0.35)
        bottom.barh(row, most - normal, left=normal, color=GREY, alpha=0.8)
    _name_rows(bottom, kinds)
    label = "size, as a power of two (pale: fewer digits)"
    bottom.set(xlim=(-60, 20), xlabel=label)
    return figure


def accuracy_by_bits() -> Figure:
    """What fewer bits cost after training, with privacy and without."""
    rows = {
        "bfloat16": "mixed_bfloat16",
        "float8": "float8",
        "MXFP8": "mxfp8",
        "int8": "int8",
        "int8, half": "int8, rotating",
        "NVFP4": "nvfp4",
        "NVFP4, half": "nvfp4, rotating",
    }
    kinds = {"none": GREY, "epsilon 8": BLUE, "epsilon 1": ORANGE}
    figure, panels = _panels(2, 3.4)
    for axes, task, title in (
        (panels[0], "digits", "images: loss of accuracy, %"),
        (panels[1], "transformer", "text: rise of nats per byte, %"),
    ):
        for offset, (privacy, color) in zip((-0.2, 0, 0.2), kinds.items(), strict=True):
            found = [few_bits(task, privacy, row) for row in rows.values()]
            label = "not private" if privacy == "none" else privacy
            _error_bars(axes, np.arange(len(rows)) + offset, found, "o", color, label)
        axes.axhline(0, color=GREY, linewidth=0.8)
        axes.set_xticks(range(len(rows)), labels=[*rows], rotation=35, ha="right")
        axes.set_title(title)
        axes.grid(axis="y")
    panels[0].legend(loc="upper left")
    return figure


def _error_bars(
    axes: Any, places: Any, found: Any, form: str, color: str, label: str
) -> None:
    """Means with their standard errors."""
    means, errors = zip(*found, strict=True)
    axes.errorbar(places, means, errors, fmt=form, ms=4, color=color, label=label)


def float_noise() -> Figure:
    """The numbers that a noisy sum can be, for two sums: floats, and a grid."""
    # Floats with three bits of fraction, and a grid, in place of those with 23 bits.
    exponents = np.arange(-4, 3)
    floats = np.unique(np.outer(2.0**exponents, 1 + np.arange(8) / 8))
    floats = np.concatenate([-floats, [0], floats])
    grid = np.arange(-32, 33) / 8

    def nearest(x: Any) -> Any:
        return floats[np.argmin(np.abs(x[:, None] - floats), axis=1)]

    figure, panels = _panels(2, 1.9, sharey=True)
    for axes, title, noise, rounded in (
        (panels[0], "floating-point noise", floats, nearest),
        (panels[1], "integer noise on a grid", grid, lambda x: x),
    ):
        of_sums = [np.unique(rounded(total + noise)) for total in (0.0, 1.0)]
        for row, (mine, others) in enumerate(itertools.permutations(of_sums)):
            tells = ~np.isin(mine, others)
            for some, color in ((mine[~tells], GREY), (mine[tells], ORANGE)):
                axes.vlines(some, row - 0.3, row + 0.3, color=color, linewidth=1.3)
        axes.set(xlim=(-1.6, 1.6), title=title, xlabel="released number")
        axes.tick_params(axis="y", length=0)
        axes.spines.left.set_visible(False)
    _name_rows(panels[0], ["sum 0", "sum 1"])
    return figure


def sums() -> Figure:
    """What one example changes in a sum, and what arithmetics reserve for rounding."""
    figure, (left, right) = _panels(2, 3.0)
    sizes = 2 ** np.arange(4, 15)
    for name, dtype, color in (
        ("float32", np.float32, GREEN),
        ("bfloat16", jnp.bfloat16, ORANGE),
    ):
        # 256 ones are as many as bfloat16 adds up.
        sizes = sizes[:6] if name == "bfloat16" else sizes
        changes = [_change_of_running_sum(int(n), dtype) for n in sizes]
        left.plot(sizes, changes, color=color, label=f"running sum in {name}")
    left.axhline(1, color=BLUE, label="integers, as in dpmp")
    left.set(xscale="log", yscale="log", ylim=(0.7, 2e3))
    title = "change by one example, in clip norms"
    left.set(xlabel="examples in the batch", title=title)

    numbers = 10.0 ** np.arange(3, 11)
    for name, color in (("exact", BLUE), ("bounded", ORANGE), ("float32", GREEN)):
        shares = [100 * _reserve(name, int(n)) for n in numbers]
        right.plot(numbers, shares, color=color, label=f'"{name}"')
    title = "clip norm that sums leave for rounding, %"
    right.set(xscale="log", xlabel="parameters", ylim=(0, 4), title=title)
    for axes in (left, right):
        axes.grid()
        axes.legend(loc="upper left")
    return figure


def _change_of_running_sum(num_examples: int, dtype: Any) -> float:
    """What an example of 1 changes, in clip norms of 1, if rounding works against it.

    Half of the examples are 1, and bring the sum to a power of two with this example,
    and to 1 less without it. The numbers above have twice the spacing of those below.
    So the others, which nearly cancel, are rounded in another way: above, each pair of
    them adds a whole spacing, and below, nothing.
    """
    num_ones = num_examples // 2
    spacing = float(jnp.finfo(dtype).eps) * num_ones / 2  # below the power of two
    ones = np.ones(num_ones - 1, dtype)
    pairs = np.tile(np.asarray([1.4 * spacing, -0.6 * spacing], dtype), num_ones // 2)
    with_it, without = (
        np.add.accumulate(np.concatenate([x, ones, pairs]), dtype=dtype)[-1]
        for x in (np.ones(1, dtype), np.zeros(1, dtype))
    )
    return float(with_it) - float(without)


def _reserve(name: str, num_parameters: int) -> float:
    """The share of the clip norm that an arithmetic leaves for rounding."""
    reserve = needs.arithmetic_of(name).rounding_reserve
    return 1 - (1 - needs.rounding_share(num_parameters, name)) / (1 + reserve)


def contributions() -> Figure:
    """The largest contribution of an example, and change of a sum, by library."""
    subjects = {
        "dpmp": "dpmp exact",
        "Opacus": "Opacus",
        "jax_privacy, float32": "jax_privacy float32",
        "jax_privacy": "jax_privacy default",
    }
    figure, panels = _panels(2, 2.0, sharey=True)
    for axes, measurement, title in (
        (panels[0], "norm of a clipped gradient", "one example's share of a sum"),
        (panels[1], "change of a sum between neighbouring batches", "change of a sum"),
    ):
        found = selfcheck(f"Largest {measurement}, over the clip norm")
        values = [max(found[subject]) for subject in subjects.values()]
        colors = [BLUE if value <= 1 else ORANGE for value in values]
        bars = axes.barh([*subjects], values, color=colors, height=0.6)
        axes.bar_label(bars, fmt="%.3f", padding=3, color=GREY)
        axes.axvline(1, color=GREY, linestyle="--", linewidth=1)
        axes.set(title=title, xlabel="clip norms, at most")
        axes.tick_params(axis="y", length=0)
        axes.margins(x=0.15)
    panels[0].invert_yaxis()
    return figure


def accuracy_by_epsilon() -> Figure:
    """Accuracy on held-out digits against epsilon, for three libraries."""
    figure, axes = _panels(1, 3.2, width=5.0)
    lines = read("utility", "library", "epsilon", data="digits")
    colors = {"dpmp": BLUE, "jax_privacy": ORANGE, "Opacus": GREEN}
    for library, color in colors.items():
        some = [x for x in lines if x["library"] == library and x["epsilon"]]
        found = [mean_and_error(x["accuracy"]) for x in some]
        epsilons = [x["epsilon"] for x in some]
        _error_bars(axes, epsilons, found, "o-", color, library)
    (plain,) = (x for x in lines if x["epsilon"] is None)
    level = float(np.mean(plain["accuracy"]))
    axes.axhline(level, color=GREY, linestyle="--", label="without privacy")
    axes.set(xscale="log", xlabel="epsilon", ylabel="accuracy")
    axes.set_xticks([1, 3, 8], labels=["1", "3", "8"])
    axes.minorticks_off()
    axes.grid()
    axes.legend()
    return figure


def memory() -> Figure:
    """What takes the memory of a step, in bytes for each parameter."""
    choices = {
        "float32": ("float32", optax.adam(1e-3)),
        "mixed_bfloat16": ("mixed_bfloat16", optax.adam(1e-3)),
        "8-bit averages": ("mixed_bfloat16", dpmp.in_8_bits(optax.adam(1e-3))),
        "and bfloat16 masters": (
            dpmp.Policy(jnp.bfloat16, jnp.bfloat16, stochastic_rounding=True),
            dpmp.in_8_bits(optax.adam(1e-3)),
        ),
    }
    params = [jax.ShapeDtypeStruct((1024, 1024), "float32")] * 64
    figure, axes = _panels(1, 2.6)
    colors: dict[str, Any] = {}
    palette = iter([BLUE, ORANGE, GREEN, "#c78fb0", "#d9c441", "#7fc4e8", GREY])
    for row, (policy, optimizer) in enumerate(choices.values()):
        estimate = dpmp.memory.estimate_memory(
            params,
            jax.ShapeDtypeStruct((64, 8), "float32"),
            policy=policy,
            optimizer=optimizer,
        )
        start = 0.0
        for line in estimate.at_peak:
            width = line.num_bytes / estimate.num_parameters
            if width < 0.01:
                continue
            label = None if line.name in colors else line.name  # once, in the legend
            color = colors[line.name] if label is None else next(palette)
            colors[line.name] = color
            axes.barh(row, width, left=start, color=color, label=label, height=0.6)
            start += width
        axes.text(start + 0.2, row, f"{start:.1f}", va="center")
    _name_rows(axes, choices)
    label = "bytes for each parameter, at the moment that needs most"
    axes.set(xlabel=label, xlim=(0, 33))
    axes.legend(loc="lower right")
    return figure


def _draw_plan(output: pathlib.Path) -> None:
    """The picture of `python -m dpmp plan`, as its guide calls it."""
    arguments = "plan --num-examples 50000 --epsilon 2 --delta 1e-6 --output"
    with contextlib.redirect_stdout(io.StringIO()):
        dpmp.__main__.main([*arguments.split(), str(output)])


_PICTURES = (error_by_bands, formats, accuracy_by_bits, float_noise, sums)
_PICTURES += (contributions, accuracy_by_epsilon, memory)
DRAWN = {draw.__name__: draw for draw in _PICTURES}


def main() -> None:
    """Draws what is asked for, or everything."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [*DRAWN, "plan"]
    parser.add_argument("pictures", nargs="*", choices=[*names, []], metavar="PICTURE")
    mpl.rcParams |= _STYLE
    os.environ["SOURCE_DATE_EPOCH"] = "0"  # the date in the files
    OUTPUT.mkdir(exist_ok=True)
    for name in parser.parse_args().pictures or names:
        path = OUTPUT / f"{name}.svg"
        if name == "plan":
            _draw_plan(path)
        else:
            DRAWN[name]().savefig(path, metadata={"Title": DRAWN[name].__doc__})
        print(path)


if __name__ == "__main__":
    main()
