"""Doors for scripts that were written for other trainers. Each file needs its own package, and an extra of its name."""
