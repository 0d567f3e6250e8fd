"""
The names that both ends of the way to the plugin in a worker must agree on.
"""

SPECULATION_PATH = "/appliance/speculation"
"""GET: what is in force and measured.  PUT: a table, a probe, or both."""
RESTART_PATH = "/appliance/restart"
"""POST: start the worker anew, with or without its draft."""
TOKEN_FILE = "APPLIANCE_CONTROL_TOKEN_FILE"  # noqa: S105 - the name of a variable that holds a path
RESTART_FILE = "APPLIANCE_RESTART_FILE"
"""Variable with the path where the supervisor finds the wish for a restart once the worker has ended."""
EXPECTATION = "APPLIANCE_DRAFT_EXPECTATION"
"""Variable with what the draft's record says it accepts, as JSON: the plugin repeats it to whoever asks."""
TARGET_DIGEST = "APPLIANCE_TARGET_DIGEST"
DRAFT_DIGEST = "APPLIANCE_DRAFT_DIGEST"
"""Variables with the content digests of what the worker was started with, for the plugin to repeat."""
RPC = "appliance_speculation"
"""Method of vLLM's engine core that takes a command as JSON and answers in JSON."""
