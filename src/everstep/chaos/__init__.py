"""Faults on purpose: what to inject, and the injection itself, from inside the worker that is struck."""
