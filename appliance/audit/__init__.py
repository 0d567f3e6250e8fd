"""
The audit log: an RFC 6962 tree of metadata-only entries, signed as C2SP checkpoints.

It fails closed: what cannot be made durable is refused with `AuditUnavailableError`.
"""
