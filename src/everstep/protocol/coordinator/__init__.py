"""The coordinator: who takes part, in which generation, and why, decided without I/O. Pure."""
