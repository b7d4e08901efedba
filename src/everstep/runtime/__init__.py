"""Processes, sockets and signals: coordinator server, launcher and agent, fork server, peers. No torch here."""
