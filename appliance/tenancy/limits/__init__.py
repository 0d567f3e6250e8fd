"""
Limits per tenant, enforced over all gateways together (decision 0020).

    quota · estimate       what a request is measured by, and how many tokens are reserved for it
    calendar               the sliding minute; days and months of budgets
    ledger                 one tenant's usage and leases, shared by all gateways, and how units are allocated
    store                  ledgers in the database
    holding · share        what one gateway holds of one limit, and of all limits of a tenant
    limiting               what the gateway calls, reservations, and the case without limits
    tenant_limiter         one tenant's requests: admitted, waiting or refused
    limiter                all tenants, and the exchange with the database
    refusal                headers and errors for clients

All but `store`, `tenant_limiter` and `limiter` are pure.
"""
