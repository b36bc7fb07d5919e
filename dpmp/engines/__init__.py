"""Gradient engines: per-example squared norms, and weighted sums of gradients.

`_interface.py` is what an engine gives. `_per_example.py` forms the gradient of every
example; `book_keeping` does without. Neither knows of privacy.
"""
