"""The live page: one web page over run directories, served on loopback unless told otherwise."""
