"""
The life of a draft model: whether it fits its target, before anything is loaded.
"""
