"""Programs that jax has traced: how to read them, run them and write them anew.

No other files know how jax writes down programs. Modules import only from rows below
their own:

    _float8
    _float8_product   _transformations
    _bodies
    _interpreter   _source_lines
"""
