"""Faults on purpose: their specification, their injection from inside the worker that is struck, and the process that
delays packets."""
