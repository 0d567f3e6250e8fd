"""
Copies a log from one database to another, and verifies every hash.

Nothing is re-encoded: leaves, checkpoints and sealed content keep their bytes, so every receipt and
checkpoint still verifies.  Fails closed: if the source changes meanwhile or is damaged, the copy ends with an
error, and what it left in the target has to be dropped.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

from sqlalchemy import Engine, Table, func, insert, select, tuple_, update
from sqlalchemy.exc import SQLAlchemyError

from appliance.audit.checkpoint import parse_body, parse_note
from appliance.audit.entry import decode
from appliance.audit.merkle import TILE_WIDTH, CompactRange, HashTree, hash_leaf, root_of_tile
from appliance.audit.store import CHUNK, Head, KeptLeaf, Leaf, SqlAuditStore, row_of, tiles_of
from appliance.audit.tables import (
    audit_checkpoints,
    audit_head,
    audit_leaves,
    audit_open_requests,
    audit_tile_hashes,
    metadata,
)
from appliance.errors import (
    AuditEntryError,
    AuditUnavailableError,
    AuditVerificationError,
    ConfigurationError,
)
from appliance.infra.database import first_line
from appliance.infra.schema import UPGRADE_SECONDS
from appliance.tenancy.limits.store import limit_books
from appliance.tenancy.tables import api_keys, tenancy_generation, tenants

ROWS = 200
"""Rows of other tables copied at a time; one may hold megabytes of content."""
_OTHER_TABLES = (
    *(
        table
        for table in metadata.sorted_tables
        # Appending the leaves makes the others.
        if table not in {audit_leaves, audit_head, audit_tile_hashes, audit_open_requests}
    ),
    tenants,
    api_keys,
    limit_books,
)


def copy_log(
    source_url: str, target_url: str, *, progress: Callable[[int, int], None], also: Sequence[Table] = ()
) -> Head:
    """
    Copy a log without writers into an empty database, which has its tables; return its head.

    `progress` is called with the entries copied and their total; `also` are further tables of the database.

    Raises ConfigurationError if a URL cannot be used or the target is not empty, AuditUnavailableError if a
    database failed or the source was written to meanwhile, AuditVerificationError if the source is damaged.
    """
    with ExitStack() as stack:
        source = stack.enter_context(closing(SqlAuditStore(source_url)))
        target = stack.enter_context(closing(SqlAuditStore(target_url)))
        reader = source.database.engine(UPGRADE_SECONDS).execution_options(writes=False)
        writer = target.database.engine(UPGRADE_SECONDS)
        try:
            others = (*_OTHER_TABLES, *also)
            _require_empty(target, writer, others)
            if source.accepted_leaves():
                raise AuditUnavailableError(
                    "entries in the source wait to be integrated: start a gateway on it and stop it before"
                )
            head = source.head()
            signed = _signed_roots(reader, head)
            _copy_leaves(source, target, head, signed, progress)
            for table in others:
                _copy_table(reader, writer, table)
                _compare_counts(reader, writer, table)
            _copy_generation(reader, writer)
        except SQLAlchemyError as error:
            raise AuditUnavailableError(f"the log could not be copied: {first_line(error)}") from error
        if source.head() != head or source.accepted_leaves():
            raise AuditUnavailableError(
                "the log was written to while it was copied: stop every gateway, drop the copy, start again"
            )
        if target.head() != head:
            raise AuditVerificationError(
                "the copy's head is not the source's: drop the copy, keep the source"
            )
    return head


def _require_empty(target: SqlAuditStore, writer: Engine, others: Sequence[Table]) -> None:
    with writer.begin() as connection:
        filled = [
            table.name
            for table in (audit_leaves, *others)
            if connection.scalar(select(func.count()).select_from(table))
        ]
    if filled or target.head().size:
        what = ", ".join(filled) or "the head"
        raise ConfigurationError(f"the target has entries already ({what}): copy into an empty database")


def _signed_roots(reader: Engine, head: Head) -> dict[int, bytes]:
    signed: dict[int, bytes] = {}
    for rows in _chunks(reader, audit_checkpoints):
        for row in rows:
            checkpoint = parse_body(parse_note(row["note"]).text)
            if checkpoint.size != row["size"] or checkpoint.size > head.size:
                raise AuditVerificationError(
                    f"a checkpoint of {checkpoint.size} entries is kept as {row['size']}, "
                    f"in a log of {head.size}"
                )
            signed[checkpoint.size] = checkpoint.root
    return signed


def _copy_leaves(
    source: SqlAuditStore,
    target: SqlAuditStore,
    head: Head,
    signed: dict[int, bytes],
    progress: Callable[[int, int], None],
) -> None:
    tree = _copy_disposed(source, target)
    _compare_root(tree, signed)
    progress(tree.size, head.size)
    for start in range(tree.size, head.size, CHUNK):
        leaves, expected = source.leaves(start, min(start + CHUNK, head.size)), Head.of(tree)
        for leaf in leaves:
            _check_leaf(leaf, tree.size)
            tree.append(leaf.leaf_hash)
            _compare_root(tree, signed)
        target.append(leaves, expected=expected, new=Head.of(tree))
        progress(tree.size, head.size)
    computed = Head.of(tree)
    if (computed, computed.subtrees) != (head, head.subtrees):
        raise AuditVerificationError(
            f"the log's head (size {head.size}) does not match its {tree.size} leaves"
        )


def _copy_disposed(source: SqlAuditStore, target: SqlAuditStore) -> CompactRange:
    """Copy the hashes of what was disposed of, and the leaves that stay; return the tree over them."""
    below = source.disposal().below
    if not below:
        return CompactRange()
    kept = source.kept(0, below)
    with target.database.engine(UPGRADE_SECONDS).begin() as connection:
        for start in range(0, below // TILE_WIDTH, CHUNK):
            nodes = source.hashes(1, start, min(start + CHUNK, below // TILE_WIDTH))
            rows = [{"level": 1, "number": number, "hash": node} for number, node in enumerate(nodes, start)]
            connection.execute(insert(audit_tile_hashes), rows)
            for each in kept:
                number = each.leaf.index // TILE_WIDTH
                if start <= number < start + len(nodes):
                    _check_kept(each, nodes[number - start])
        tiles_of(connection).complete(below)
        for each in kept:
            connection.execute(insert(audit_leaves).values(row_of(each.leaf)))
        tree = HashTree(below, tiles_of(connection).read).compact()
        values = {"size": below, "root": tree.root(), "frontier": b"".join(tree.subtrees)}
        connection.execute(update(audit_head).values(values))
    return tree


def _check_kept(kept: KeptLeaf, root: bytes) -> None:
    leaf = kept.leaf
    if not kept.path:
        raise AuditVerificationError(
            f"entry {leaf.index} was disposed of, and is still there: complete the disposal first"
        )
    _check_leaf(leaf, leaf.index)
    if root_of_tile(leaf.leaf_hash, leaf.index % TILE_WIDTH, kept.path) != root:
        raise AuditVerificationError(f"entry {leaf.index} was disposed of, and another is stored")


def _check_leaf(leaf: Leaf, index: int) -> None:
    if leaf.index != index:
        raise AuditVerificationError(f"entry {index} is missing from the log")
    if hash_leaf(leaf.leaf) != leaf.leaf_hash:
        raise AuditVerificationError(f"entry {index} was altered: its hash is another")
    try:
        entry = decode(leaf.leaf)
    except AuditEntryError as error:
        raise AuditVerificationError(f"entry {index} cannot be read: {error}") from error
    if (leaf.type, leaf.request_id) != (entry.type.value, entry.fields.get("request_id")):
        raise AuditVerificationError(f"entry {index} is stored under another type or request than its own")


def _compare_root(tree: CompactRange, signed: dict[int, bytes]) -> None:
    if tree.size in signed and signed[tree.size] != tree.root():
        raise AuditVerificationError(f"the first {tree.size} entries are not the ones that were signed")


def _copy_table(reader: Engine, writer: Engine, table: Table) -> None:
    for rows in _chunks(reader, table):
        with writer.begin() as connection:
            connection.execute(insert(table), rows)


def _copy_generation(reader: Engine, writer: Engine) -> None:
    """With the MAC over generation and rows; on generation 0 a first start would make tenants."""
    with reader.begin() as old, writer.begin() as new:
        row = old.execute(select(tenancy_generation)).mappings().one()
        new.execute(update(tenancy_generation).values(dict(row)))


def _compare_counts(reader: Engine, writer: Engine, table: Table) -> None:
    query = select(func.count()).select_from(table)
    with reader.begin() as old, writer.begin() as new:
        if old.scalar(query) != new.scalar(query):
            raise AuditUnavailableError(
                f"{table.name} was written to while it was copied: stop every gateway and start again"
            )


def _chunks(reader: Engine, table: Table) -> Iterator[list[dict[str, Any]]]:
    """Yield all rows by primary key, in chunks, each in a transaction of its own."""
    keys = list(table.primary_key.columns)
    query = select(table).order_by(*keys).limit(ROWS)
    after: tuple[Any, ...] | None = None
    while True:
        chunk = query if after is None else query.where(tuple_(*keys) > tuple_(*after))
        with reader.begin() as connection:
            rows = [dict(row) for row in connection.execute(chunk).mappings()]
        if rows:
            yield rows
        if len(rows) < ROWS:
            return
        after = tuple(rows[-1][key.name] for key in keys)
