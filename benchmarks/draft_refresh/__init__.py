"""
The whole way of a draft, on one machine: the target changes, acceptance falls, a refresh brings it back.
"""
