"""Findings: what the statistics of a site say about the model, one file each, naming the Mod or transform that mends it."""
