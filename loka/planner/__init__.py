"""Planner: the fastest kernels that are accurate enough (Survey → Plan)."""
