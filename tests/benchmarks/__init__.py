"""Benchmarks that print ratios measured within one run. None asserts a time, because machines are noisy."""
