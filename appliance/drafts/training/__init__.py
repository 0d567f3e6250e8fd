"""
Trains a draft on this site's own data.

Only the modules that `python -m appliance.drafts.training` runs import `torch` and `transformers`; commands
import the others.
"""
