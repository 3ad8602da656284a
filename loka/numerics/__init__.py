"""Formats, scalings and error metrics in pure torch: what every kernel is checked against, on any device."""
