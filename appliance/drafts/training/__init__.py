"""
Training a draft on this site's own data.

`torch` and `transformers` are imported by the modules that the process `python -m appliance.drafts.training`
runs, and by no other; what a command needs is in the modules that do without.
"""
