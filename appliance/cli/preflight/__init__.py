"""
What an installer asks before going live: one file for each family of checks.

Looking (`look_...`) is kept apart from judging (`judge_...`): the first touches the machine, the second is
a function of what was seen.
"""
