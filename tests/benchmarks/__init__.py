"""Benchmarks: each prints ratios measured within one run, since machines are noisy. None asserts a time."""
