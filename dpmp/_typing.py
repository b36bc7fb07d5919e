"""Types shared by all layers."""

from typing import Any, TypeAlias

PyTree: TypeAlias = Any
