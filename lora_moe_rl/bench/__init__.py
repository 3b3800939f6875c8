"""Benchmarks, each behind a gate: a wrong run has no seconds to report."""
