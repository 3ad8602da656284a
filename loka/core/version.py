"""LoKA's version, in the lowest layer: every file that carries measurements names it."""

__version__ = "0.1.0"
