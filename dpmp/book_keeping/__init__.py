"""Clipped sums of per-example gradients that are never formed."""

from dpmp.book_keeping._engine import engine as engine
