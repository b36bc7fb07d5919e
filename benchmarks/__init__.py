"""Benchmarks. Each file asks one question: `python -m benchmarks.clipping`."""
