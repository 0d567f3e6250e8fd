"""The registered drafts of a site: files, signatures, and which of them serves."""
