"""The data plane: the way of a request from admission to its outcome."""
