"""The names that the gateway, the supervisor and the plugin in a worker share."""

SPECULATION_PATH = "/appliance/speculation"
"""On the control port.  GET: the draft-token table in force and the measurements.  PUT: a table, a probe, or
both."""
RESTART_PATH = "/appliance/restart"
"""On the control port.  POST: restart the worker, with or without its draft."""
USAGE_PATH = "/appliance/usage/"
"""On the worker's own port.  GET, followed by a request's `X-Request-Id`: its tokens so far, after its client
left."""
CONTROL_ADDRESS = "APPLIANCE_CONTROL_ADDRESS"
"""Variable with host and port of the control listener in the engine process; without it there is none."""
CONTROL_CERTIFICATE_FILE = "APPLIANCE_CONTROL_CERTIFICATE_FILE"
CONTROL_KEY_FILE = "APPLIANCE_CONTROL_KEY_FILE"
CONTROL_CLIENT_CA_FILE = "APPLIANCE_CONTROL_CLIENT_CA_FILE"
"""Variables with the files of its TLS: certificate and key, and the authorities of its clients."""
TOKEN_FILE = "APPLIANCE_CONTROL_TOKEN_FILE"  # noqa: S105 - the name of a variable that holds a path
SCRAPE_TOKEN_FILE = "APPLIANCE_SCRAPE_TOKEN_FILE"  # noqa: S105 - as above
OPEN_ROUTES = "APPLIANCE_OPEN_ROUTES"
"""Variable of a worker behind a router of others: with `1` vLLM's own routes need no token of ours.  The
launcher never sets it."""
RESTART_FILE = "APPLIANCE_RESTART_FILE"
"""Variable with the path of the restart request, which the supervisor reads after the worker has ended."""
EXPECTATION = "APPLIANCE_DRAFT_EXPECTATION"
"""Variable with the acceptance that the draft's record promises, as JSON; the plugin repeats it."""
DRAIN_SECONDS = "APPLIANCE_DRAIN_SECONDS"
"""Variable with the maximum seconds that a stopping worker waits for its running requests."""
LEAVING_HEADER = "x-appliance-leaving"
"""Header of a stopping worker's answers; a refusal with it has not been computed, and may go to another."""
LEAVING = {"error": "the worker is stopping", "leaving": True}
"""Body of such a refusal."""
TARGET_DIGEST = "APPLIANCE_TARGET_DIGEST"
DRAFT_DIGEST = "APPLIANCE_DRAFT_DIGEST"
"""Variables with the content digests of the weights in use; the plugin repeats them."""
