"""Programs that jax has traced: how to read, run and rewrite them.

No other files know how jax represents programs. Modules import only from rows below
their own:

    _float8   _transformations   _losses
    _bodies
    _interpreter   _source_lines
    _primitives
"""
