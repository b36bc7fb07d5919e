"""Builds the guides and the reference: `sphinx-build -W -n docs build/docs`."""

import importlib.metadata

project = "dpmp"
version = release = importlib.metadata.version("dpmp")
html_title = "dpmp"
html_theme = "sphinx_book_theme"
html_theme_options = {
    "show_toc_level": 2,
    "home_page_in_toc": True,
    "navbar_persistent": [],
}

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

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
