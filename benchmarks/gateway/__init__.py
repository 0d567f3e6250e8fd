"""What the gateway adds to a request, next to other people's gateways; see `benchmarks.gateway_overhead`."""
