"""Checks on this machine the promises that dpmp makes of its arithmetic.

Run `python -m dpmp selfcheck`.
"""
