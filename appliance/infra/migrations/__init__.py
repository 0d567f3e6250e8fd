"""How the audit log's database came to be as it is, step by step; run by `appliance.infra.schema`."""
