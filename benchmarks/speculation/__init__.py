"""
Speculation by concurrency: the target alone, each fixed number of draft tokens, and the monitor.
"""
