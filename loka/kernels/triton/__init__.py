"""Kernels of our own, in Triton. ``*_kernels.py`` import Triton and are loaded by the first call that needs them;
the other modules hold what a caller uses: ops registered with torch, and the choices of tiles as plain functions."""
