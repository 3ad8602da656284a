"""Mods change a model so that more of it is safe and fast in 8 bits: ``loka.apply_mods(model)``, before training.

One file each; adding a Mod is adding a file here that registers it in ``MODS``.
"""
