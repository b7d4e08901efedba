"""One host: its agent, fork server, workers, cells and progress board."""
