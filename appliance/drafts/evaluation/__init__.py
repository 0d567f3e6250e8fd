"""
Whether a new draft is at least as good as the one in service, measured before it may serve anybody.
"""
