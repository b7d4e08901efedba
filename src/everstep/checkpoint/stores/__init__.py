"""The kinds of places that a URL may name, one per file."""
