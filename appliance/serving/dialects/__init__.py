"""
How the gateway reads and writes each family of routes: OpenAI's, Anthropic's and vLLM's own.

- `dialect`: the interface of a family, the default implementation, and edits of a body for a worker.
- `chat`, `responses`, `messages`: the families that generate text, with their streams.
- `counts`: routes that generate no text: embeddings, reranking, scores, tokens.
- `policy`, `media`: members that a request must not use.
- `routes`: all routes, each with its dialect.  A path that is not listed is not served.

Everything here is pure.
"""
