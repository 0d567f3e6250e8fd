"""
The audit log: an RFC 6962 tree of metadata-only entries, signed as C2SP checkpoints.

- `registry`, `entry`: what is recorded, and its one canonical encoding.
- `merkle`, `checkpoint`, `proof`: the arithmetic and the formats; pure.
- `keys`, `tables`, `store`, `sealed`, `recovery`: what is on disk and in the database.
- `log`: the only way in, with `writer`, its one task.  `durability`: spool and health.
- `content`: kept requests and answers: sealing, keys, erasure.
- `witness`: another party that keeps the newest head.
- `export`: the files for an auditor.  `verify`: the auditor's program; it shares formats with the writer, and
  no code.

It fails closed: what cannot be made durable is refused with `AuditUnavailableError`.
"""
