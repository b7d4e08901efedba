"""Checkpoints: of the whole job, in terms of the unsplit state, written by many, readable by any topology."""
