"""Files of a job: whose they are, and how they pass between hosts."""
