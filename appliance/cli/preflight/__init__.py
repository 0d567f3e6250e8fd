"""
`appliance preflight`: checks before going live, one module per family.

Functions that touch the machine (`detect_`, `read_`, `inspect_`, `measure_`) are separate from pure
decisions (`judge_`).
"""
