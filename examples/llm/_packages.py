"""Imports packages of the extra `llm`, most of them when they are first needed."""

import importlib
from typing import Any


def need(name: str) -> Any:
    """Imports and returns the package `name`; an error says how to install it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise ModuleNotFoundError(
            f"examples/llm needs the package {error.name}, which is not installed. "
            "Run: pip install '.[llm]'",
            name=error.name,
        ) from None


need("flax")  # which every model is made of
