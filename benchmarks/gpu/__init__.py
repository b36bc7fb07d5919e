"""What this library needs a GPU for, in one command: `python -m benchmarks.gpu`."""
