"""Dispatch: run a Plan in the user's model (Plan → bound kernels under autograd)."""
