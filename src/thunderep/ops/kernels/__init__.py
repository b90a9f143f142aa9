"""Triton kernels: imported by the operators when one is launched, never before."""
