"""Examples: scripts to read and to run, and language models.

This file makes `examples` mean this folder, where another package of the same name is
installed. Opacus installs one.
"""
