"""Timings beside peers, all in one run on one machine: `python -m benchmarks` (or `make bench`)."""
