"""Files of a job: their owners, and their transfer between hosts."""
