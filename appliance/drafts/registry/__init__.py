"""
The drafts a site has: where they lie, who vouches for them, and which of them serves.
"""
