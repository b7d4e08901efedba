"""The coordinator process, its journal, the lease, and the search for the coordinator."""
