"""Forwards the log to a SIEM: RFC 5424 messages over TLS, with what proves that none is missing."""
