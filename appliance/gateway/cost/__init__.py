"""
What serving costs: engine time and energy of each tenant and model, and their price.

    poll of a worker ─► account ─► usage of tenants ─► database ─► report ─► page, table, JSON

Recorded in seconds, joules and tokens; only a report converts them to money.
"""
