"""Faults on purpose: what to inject, the injection itself, from inside the worker that is struck, and the process
that delays packets."""
