"""
How each family of routes reads and writes: what vLLM serves under OpenAI's, Anthropic's and its own names.

- `dialect`: what the gateway asks of every family, and the families without streams of their own.
- `chat`, `responses`, `messages`: the families that generate text, with their streams.
- `counts`: routes that generate none: embeddings, reranking, scores, tokens.
- `errors`: how an error looks in each.  `edits`: how a body is changed on its way to a worker.
- `policy`, `media`: what a request may not ask of a worker.
- `routes`: the list of all routes, each with its dialect.  What is not in it is not served.

Everything here is pure.
"""
