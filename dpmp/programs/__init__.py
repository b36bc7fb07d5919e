"""Programs that jax has traced: how to read them, run them and write them anew.

These are the only files that import `jax.extend`, but for `dpmp/_random.py`. Modules
import only from rows below their own:

    _float8
    _float8_product   _transformations
    _bodies
    _interpreter   _source_lines
"""
