"""Connections: addresses, handshakes, TLS, frames, and who has proved nothing yet."""
