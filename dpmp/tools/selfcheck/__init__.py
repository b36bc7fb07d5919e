"""Checks on this machine what dpmp promises of its arithmetic.

Run `python -m dpmp selfcheck`.
"""
