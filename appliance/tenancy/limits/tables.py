"""
The one table: each tenant's book, as the newest of the log's migrations leaves it.
"""

from sqlalchemy import Column, MetaData, Table, Text

metadata = MetaData()

# A row is written by whoever has locked it, and by nobody without having read it under that lock.
limit_books = Table(
    "limit_books",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("book", Text, nullable=False),
)
