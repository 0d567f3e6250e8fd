"""
The bundle: everything an installation needs, for a site without internet.

A directory that is an OCI image layout, with a manifest of every byte and a signature of the manifest.
Built and signed on a connected machine, verified and loaded at the site.  The format is in
docs/reference/bundle-format.md.
"""
