"""Benchmarks. Each file asks one question: `python -m benchmarks.side_by_side`."""
