"""
Limits per tenant, enforced over all gateways together (decision 0020).

`ledger` is what all gateways share about one tenant, `share` what one gateway holds of it; `limiter` admits
requests.  All modules but `store`, `tenant_limiter` and `limiter` are pure.
"""
