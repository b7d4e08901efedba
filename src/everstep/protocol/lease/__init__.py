"""Which of several coordinators decides: the lease that one holds, and the journal that only its holder writes.
Pure.
"""
