"""Checks, on this machine, the promises that dpmp makes about its arithmetic.

Run `python -m dpmp selfcheck`.
"""
