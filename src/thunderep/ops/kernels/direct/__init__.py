"""Kernels of the `direct` transport: they write to and read from pinned host memory themselves."""
