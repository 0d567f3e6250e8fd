"""How entries are kept while the database takes none, and whether what is kept is still what was written."""
