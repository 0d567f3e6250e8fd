"""
What drafting saved, as the cost report says it, against what a benchmark measures in the same run.
"""
