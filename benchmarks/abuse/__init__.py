"""What a tenant that attacks the gateway costs the other tenants, in time."""
