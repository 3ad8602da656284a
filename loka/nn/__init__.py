"""Modules that mods install and dispatch binds."""
