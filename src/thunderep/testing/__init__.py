"""What tests and benchmarks share: real rank processes, random inputs, comparisons."""
