"""Files and commands that `everstep launch` makes for each engine; engines start hosts, and only Everstep starts
workers."""
