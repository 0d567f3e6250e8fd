"""Time stamps (RFC 3161): an authority states when the log had its first entries."""
