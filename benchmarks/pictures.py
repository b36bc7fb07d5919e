"""Draws the pictures of the guides from the lines in results/.

pip install '.[bench,plot]'
python -m benchmarks.pictures        # writes docs/error_by_bands.svg
"""

import pathlib
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from benchmarks.markdown import read

DOCS = pathlib.Path(__file__).parents[1] / "docs"


def error_by_bands() -> Figure:
    """The error of correlated noise over that of independent noise, by bands."""
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    axes: Any = figure.subplots(1, 3, sharey=True)
    for axis, epsilon in zip(axes, (1.0, 3.0, 8.0), strict=True):
        for line in read("least_noise", "setting", epsilon=epsilon):
            error = line["error"]
            shares = np.array(list(error.values())) / error["1"]
            axis.plot([int(x) for x in error], shares, color="#0072b2", alpha=0.7)
            inverse = line["of_inverse"]
            shares = np.array(list(inverse.values())) / error["1"]
            bands = [int(x) for x in inverse]
            axis.plot(bands, shares, "--", color="#d55e00", alpha=0.7)
        axis.set_xscale("log", base=2)
        axis.set_xticks([1, 2, 4, 8, 16], labels=["1", "2", "4", "8", "16"])
        axis.set_title(f"epsilon {epsilon:.0f}", fontsize="medium")
        axis.set_xlabel("bands")
        axis.grid(alpha=0.3)
        axis.set_ylim(0, 1.3)
    axes[0].set_ylabel("error, over that of one band")
    axes[0].plot([], color="#0072b2", label="bands")
    axes[0].plot([], "--", color="#d55e00", label="bands of the inverse")
    axes[0].legend(fontsize="small", frameon=False, loc="lower left")
    return figure


if __name__ == "__main__":
    # Text stays text, and the same picture gives the same file.
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "dpmp"}
    metadata = {"Date": None, "Title": "Error of the parameters, by number of bands"}
    error_by_bands().savefig(DOCS / "error_by_bands.svg", metadata=metadata)
