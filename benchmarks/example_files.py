"""Files of examples/ as modules, for benchmarks that run the same models."""

import importlib
import pathlib
import sys
from typing import Any

FOLDER = pathlib.Path(__file__).parents[1] / "examples"


def load(name: str) -> Any:
    """Imports an example, which finds the files next to it as when it is run."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)
