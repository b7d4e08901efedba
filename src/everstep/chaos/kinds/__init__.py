"""The faults there are, one per file: what each says of itself, and how it strikes."""
