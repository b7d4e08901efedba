"""The command line: what people type and see. Torch is imported only where a command needs it."""
