"""Kernels of several libraries behind one contract and one executor."""
