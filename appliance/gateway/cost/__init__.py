"""
What serving costs: engine time and energy of each tenant and model, and their price.

    look at a worker ─► account ─► shares of tenants ─► book ─► database ─► report ─► page, table, JSON

Recorded in seconds, joules and tokens; money is only ever made of them when a report is asked for.
"""
