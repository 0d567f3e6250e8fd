"""
Taking samples for training out of kept content, for as long as that content is kept.
"""
