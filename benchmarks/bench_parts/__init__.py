"""What several benchmarks share; found beside them, since they are run as scripts."""
