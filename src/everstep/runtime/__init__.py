"""Processes, sockets and signals: job, coordinator, agents, fork server, peers. No torch here."""
