"""Connections: addresses, handshakes, TLS, frames, and strangers that have proved nothing yet."""
