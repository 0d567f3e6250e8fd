"""What is kept of requests and answers, sealed, and how it is erased again."""
