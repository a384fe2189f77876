"""Benchmarks; run as ``python -m bench.NAME --json OUT``. Results live in bench/results."""
