"""
The bundle: everything an installation needs, carried into a building that has no internet.

A directory that is an OCI image layout, beside it a manifest of every byte and a signature of the
manifest.  Built and signed on a connected machine, verified and loaded in the enclave.  The format
is in docs/reference/bundle-format.md.
"""
