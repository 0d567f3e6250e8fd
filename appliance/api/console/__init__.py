"""
The operator console: server-rendered pages at `/console` for operators with an admin key.

It uses the functions of the admin API.  It calls no model: the chat page uses the public API with a tenant's
key.
"""
