"""Gradient engines: per-example squared norms, and weighted sums of gradients.

`_methods.py` defines the interface of an engine, and makes one by its name. The engine
in `_per_example.py` materializes per-example gradients. The engine in `book_keeping`
computes the same norms and sums without them. No engine knows of privacy.
"""
