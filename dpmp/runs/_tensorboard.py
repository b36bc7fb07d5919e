"""Writes the metrics of a run for TensorBoard too, where tensorboardX is installed.

tensorboardX writes the files of TensorBoard, and needs neither TensorFlow nor PyTorch.
"""

import pathlib
from collections.abc import Mapping
from typing import Any


class TensorBoard:
    """Writes scalars to `DIR/tensorboard`, or does nothing without tensorboardX."""

    def __init__(self, directory: pathlib.Path, step: int):
        """Goes on after `step` steps; TensorBoard then hides older, later steps."""
        self._writer: Any = None
        try:
            # It is optional, so that it may be missing where types are checked.
            from tensorboardX import (  # pyright: ignore[reportMissingImports]
                SummaryWriter,
            )
        except ModuleNotFoundError:
            return
        folder = directory / "tensorboard"
        folder.mkdir(mode=0o700, exist_ok=True)
        self._writer = SummaryWriter(str(folder), purge_step=step + 1)
        for file in folder.iterdir():
            file.chmod(0o600)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the values of a step."""
        if self._writer is None:
            return
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes everything, and ends the thread that writes."""
        if self._writer is not None:
            self._writer.close()
