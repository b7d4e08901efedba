"""Who decides: the coordinator process, its journal, the lease, and how hosts find the coordinator."""
