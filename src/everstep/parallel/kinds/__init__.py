"""The kinds of transports, one per file: what each is made of."""
