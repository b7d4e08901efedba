"""The driver: one worker's whole behaviour, without I/O. `train` and `sim` carry out what it asks for. Pure."""
