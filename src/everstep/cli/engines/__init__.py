"""What `everstep launch` writes for each engine; engines start hosts, and only Everstep starts workers."""
