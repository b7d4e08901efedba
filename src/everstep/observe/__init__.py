"""Words of a job to the outside: events, logs. L3, but importable by its neighbours of the same layer."""
