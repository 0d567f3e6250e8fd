"""
The audit log: an RFC 6962 tree of metadata-only entries, signed as C2SP checkpoints.

- `registry`, `entry`: what is recorded, and its one canonical encoding.
- `merkle`, `checkpoint`, `proof`: the arithmetic and the formats; pure.
- `keys`, `tables`, `schema`, `migrations`, `store`, `sealed`, `recovery`: what touches a disk.
- `log`: the only way in, `writer` its one task.  `durability`: what stands before it while the database
  takes nothing, and whether it is well.
- `content`: what is kept of requests and answers, sealed, and erased.
- `witness`: somebody else who keeps the newest head.
- `export`: what an auditor is given.  `verify`: what the auditor runs; it shares formats with the
  writer, and no code.

It fails closed: what cannot be made durable is refused with `AuditUnavailableError`.
"""
