"""
Limits that hold: how much of each tenant's allowance is used, over all gateways together.

    quota · estimate        what a request is measured by, and for how much it is reserved
    window · calendar       when what was used counts no longer
    book                    what all gateways share about one tenant, and how it is handed out
    holding · reservation   what one gateway holds of it, and what one request took
    ledger · tables         the books in the database
    lane · limiter          requests in, reservations out
    headers · refusal       what clients are told

All but the ledger, lanes and the limiter are pure.
"""
