"""Files of results: `selfcheck` and `audit` write them, and `report` reads them."""

import argparse
import dataclasses
import importlib.metadata
import json
import math
import pathlib
import platform
from collections.abc import Iterable, Mapping, Set
from typing import Any

import jax

from dpmp import _validate

_PACKAGES = ("dpmp-jax", "jax", "jaxlib", "dp-accounting", "numpy")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--json`, a file that can be written when the checks end."""
    text = "also write the results to FILE"
    parser.add_argument("--json", type=_new_file, metavar="FILE", help=text)


def _new_file(name: str) -> pathlib.Path:
    path = pathlib.Path(name)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {path.parent}")
    return path


def versions() -> dict[str, str]:
    """The versions of the packages that results depend on."""
    return {name: importlib.metadata.version(name) for name in _PACKAGES}


def device() -> str:
    """The first device of this machine."""
    return f"{jax.devices()[0].device_kind} ({platform.machine()})"


def write(path: pathlib.Path, results: Iterable[Mapping[str, Any]]) -> None:
    """Writes results, each with the field "passed", and where they were found."""
    content = {
        "device": device(),
        "python": platform.python_version(),
        "versions": versions(),
        "results": list(map(as_json, results)),
    }
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")


def save(path: str | pathlib.Path, **audits: Any) -> None:
    """Writes audits of `dpmp.audit` to a file, for `python -m dpmp report --checks`.

    Args:
      path: the file, which replaces an existing one.
      **audits: results of `canaries`, `replay`, `sums`, `batches` or `memorization`,
        each by a name for the file.

    Raises:
      ValueError: if there is none, or something else.
    """
    if not audits or not all(hasattr(x, "passed") for x in audits.values()):
        _validate.fail(
            "audits must be results of dpmp.audit, each with a name. Use "
            "save('audit.json', replay=dpmp.audit.replay(...)).",
            audits=list(audits),
        )
    write(pathlib.Path(path), [as_result(x, name) for name, x in audits.items()])


def as_result(audit: Any, subject: str) -> dict[str, Any]:
    """An audit for `write`."""
    return {"subject": subject, "passed": audit.passed, **dataclasses.asdict(audit)}


def as_json(result: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a result; strings replace numbers that JSON cannot express."""

    def finite(x: Any) -> Any:
        if isinstance(x, list | tuple):
            return [finite(y) for y in x]
        return str(x) if isinstance(x, float) and not math.isfinite(x) else x

    return {name: finite(x) for name, x in result.items()}


def read(path: pathlib.Path, costs: Set[str]) -> dict[str, Any]:
    """What a file has results of, and how many passed; ValueError for other files."""
    try:
        content = json.loads(path.read_text())
        passed = [bool(x["passed"]) for x in content["results"] if _counts(x)]
        names = dict.fromkeys(filter(None, map(_name_of, content["results"])))
        where = str(content["device"])
        mechanisms = {str(x.get("mechanism", "")) for x in content["results"]} - {""}
    except (OSError, ValueError, KeyError, TypeError) as error:
        _validate.fail(
            "checks must be files that selfcheck or audit have written. Pass those of "
            "their option --json.",
            file=str(path),
            reason=getattr(error, "strerror", None) or "it has no such results",
        )
    return {
        "file": path.name,
        "device": where,
        "number": len(passed),
        "passed": sum(passed),
        "names": list(names),
        # None for checks of the software alone, and for private sizes of data.
        "of_these_runs": mechanisms <= costs if mechanisms else None,
    }


def _counts(result: Mapping[str, Any]) -> bool:
    """Whether a check has failed, or could have with so few canaries."""
    claimed, largest = (result.get(x) for x in ("claimed", "largest_epsilon"))
    if largest is None or not result["passed"]:
        return True
    return isinstance(claimed, int | float) and claimed <= largest


def _name_of(result: Mapping[str, Any]) -> str:
    """What was checked; of an audit with a lower bound on epsilon, the bound too."""
    name, bound = str(result.get("subject", "")), result.get("epsilon")
    if isinstance(bound, float):
        name += f": epsilon at least {bound:.3f}"
    if isinstance(claimed := result.get("claimed"), float):
        name += f", claimed {claimed:.3f}"
    if result.get("has_preparation") is False:
        name += " (not of what was made from the data before)"
    if not _counts(result):
        shown = f"so few canaries show {result['largest_epsilon']:.3f} at most"
        has_claim = isinstance(claimed, int | float)
        name += f", and {shown}" if has_claim else ", and no claim was tested"
    return name
