"""Probe: learn the distributions of a model's sites while it trains (model + batches → Record)."""
