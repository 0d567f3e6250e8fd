"""
The operator console: server-rendered pages at `/console` for people with an admin key.

It shows what the admin API shows and does what the admin API does, by the same functions.  It calls no
model: the chat box talks to the public API as the tenant whose key it is given.
"""
