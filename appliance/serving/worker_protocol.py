"""The names that the gateway, the supervisor and the plugin in a worker share."""

SPECULATION_PATH = "/appliance/speculation"
"""GET: the draft-token table in force and the measurements.  PUT: a table, a probe, or both."""
RESTART_PATH = "/appliance/restart"
"""POST: restart the worker, with or without its draft."""
USAGE_PATH = "/appliance/usage/"
"""GET, followed by a request's `X-Request-Id`: its tokens so far, after its client left."""
TOKEN_FILE = "APPLIANCE_CONTROL_TOKEN_FILE"  # noqa: S105 - the name of a variable that holds a path
SCRAPE_TOKEN_FILE = "APPLIANCE_SCRAPE_TOKEN_FILE"  # noqa: S105 - as above
OPEN_ROUTES = "APPLIANCE_OPEN_ROUTES"
"""Variable of a worker behind a router of others: with `1` vLLM's own routes need no token of ours.  The
launcher never sets it."""
RESTART_FILE = "APPLIANCE_RESTART_FILE"
"""Variable with the path of the restart request, which the supervisor reads after the worker has ended."""
EXPECTATION = "APPLIANCE_DRAFT_EXPECTATION"
"""Variable with the acceptance that the draft's record promises, as JSON; the plugin repeats it."""
TARGET_DIGEST = "APPLIANCE_TARGET_DIGEST"
DRAFT_DIGEST = "APPLIANCE_DRAFT_DIGEST"
"""Variables with the content digests of the weights in use; the plugin repeats them."""
RPC = "appliance_speculation"
"""Utility method of vLLM's engine core: JSON command in, JSON answer out."""
