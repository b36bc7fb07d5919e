"""Gradient engines: per-example squared norms, and weighted sums of gradients.

`_interface.py` defines the interface of an engine. The engine in `_per_example.py`
forms the gradient of every example. The engine in `book_keeping` computes the same
norms and sums without forming these gradients. No engine knows of privacy.
"""
