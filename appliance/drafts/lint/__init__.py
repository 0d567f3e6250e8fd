"""
Whether a draft fits its target, judged before vLLM loads it.
"""
