"""Builds the guides and the reference: `sphinx-build -W -n docs build/docs`."""

import functools
import importlib.metadata
import importlib.util
from typing import Any

import latex2mathml.converter
from docutils import nodes

project = "dpmp"
author = "the authors of dpmp"
version = release = importlib.metadata.version("dpmp-jax")
html_title = "dpmp"
html_theme = "sphinx_book_theme"
html_theme_options = {
    "show_toc_level": 2,
    "home_page_in_toc": True,
    "navbar_persistent": [],
}
html_static_path = ["_static"]
html_css_files = ["pages.css"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_external_toc",
]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

# The reference has `dpmp.tunix` without Tunix, which installs hundreds of megabytes.
autodoc_mock_imports = [
    x for x in ("flax", "tunix") if importlib.util.find_spec(x) is None
]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # fields of dataclasses are members already
napoleon_custom_sections = ["Guarantees"]
copybutton_prompt_text = ">>> "

# Types of other packages, and those that are not public, have no page here.
nitpick_ignore_regex = [
    (
        "py:.*",
        r"(jax|jaxlib|optax|tunix|numpy|np|dp_accounting|collections|fractions|pathlib|os)\b.*",
    ),
    ("py:.*", r"dpmp\..*\b_.*"),
]

html_math_renderer = "mathml"  # which browsers draw without a script from the network


def _write_mathml(page: Any, node: nodes.Element, display: str) -> None:
    page.body.append(latex2mathml.converter.convert(node.astext(), display=display))
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Adds formulas as MathML."""
    inline, block = (
        (functools.partial(_write_mathml, display=x), None) for x in ("inline", "block")
    )
    app.add_html_math_renderer("mathml", inline, block)
