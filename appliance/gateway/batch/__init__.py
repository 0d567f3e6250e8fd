"""Work that can wait: files that tenants leave here, and batches of requests run in idle hours."""
