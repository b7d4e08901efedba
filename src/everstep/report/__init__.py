"""The story of a job, read from its directory: the reading library, and the report made of it."""
