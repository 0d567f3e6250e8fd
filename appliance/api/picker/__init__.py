"""The endpoint picker of the Gateway API inference extension: which worker the proxy of others should use."""
