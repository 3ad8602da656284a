"""What kernels cost: error and time."""
