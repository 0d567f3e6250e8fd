"""What the audit log can take, and what it costs a request."""
