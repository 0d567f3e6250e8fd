"""
The registry of entry types: what the audit log records, with the reason each type exists.

Every type is a closed schema.  A field that is not listed here cannot be written, so no caller can add
content or personal data to the log.  The reference page is generated from this file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType


class EntryType(StrEnum):
    REQUEST_INTENT = "request.intent"
    REQUEST_OUTCOME = "request.outcome"
    REQUEST_ABORTED = "request.aborted"
    REQUEST_DENIED = "request.denied"
    CALLERS_REFUSED = "callers.refused"
    CONSOLE_LOGIN = "console.login"
    FILE_CREATED = "file.created"
    FILE_DELETED = "file.deleted"
    BATCH_CREATED = "batch.created"
    BATCH_ENDED = "batch.ended"
    SPECULATION_CHANGED = "speculation.changed"
    SPECULATION_OVERRIDDEN = "speculation.overridden"
    WORKER_STARTED = "worker.started"
    WORKER_STOPPED = "worker.stopped"
    WORKER_RECYCLED = "worker.recycled"
    WORKER_DRAINED = "worker.drained"
    WORKER_FAILED = "worker.failed"
    DRAFT_IMPORTED = "draft.imported"
    DRAFT_HARVESTED = "draft.harvested"
    DRAFT_TRAINED = "draft.trained"
    DRAFT_EVALUATED = "draft.evaluated"
    DRAFT_TRIED = "draft.tried"
    DRAFT_PROMOTED = "draft.promoted"
    DRAFT_ROLLED_BACK = "draft.rolled_back"
    TENANT_CREATED = "tenant.created"
    TENANT_CHANGED = "tenant.changed"
    TENANT_DELETED = "tenant.deleted"
    KEY_CREATED = "key.created"
    KEY_REVOKED = "key.revoked"
    KEY_ROTATED = "key.rotated"
    TENANTS_SEALED = "tenants.sealed"
    CONFIG_CHANGED = "config.changed"
    AUDIT_STARTED = "audit.started"
    AUDIT_READ = "audit.read"
    AUDIT_SPOOLED = "audit.spooled"
    AUDIT_GAP = "audit.gap"
    AUDIT_DISPOSED = "audit.disposed"
    ERASURE = "erasure"
    HOLD_PLACED = "hold.placed"
    HOLD_RELEASED = "hold.released"
    APPROVAL_REQUESTED = "approval.requested"
    APPROVAL_CLOSED = "approval.closed"
    EGRESS_ATTESTED = "egress.attested"
    BUNDLE_INSTALLED = "bundle.installed"
    SIGNER_ROTATED = "signer.rotated"

    @property
    def closes_request(self) -> bool:
        """Whether it ends the request that a `request.intent` began."""
        return self is EntryType.REQUEST_OUTCOME or self is EntryType.REQUEST_ABORTED

    @property
    def outlives_disposal(self) -> bool:
        """Whether its entries stay in the log: later entries are judged by them."""
        return self in _KEPT


_KEPT = frozenset(
    {
        EntryType.TENANT_CREATED,
        EntryType.TENANT_CHANGED,
        EntryType.TENANT_DELETED,
        EntryType.TENANTS_SEALED,
        EntryType.KEY_CREATED,
        EntryType.KEY_ROTATED,
        EntryType.KEY_REVOKED,
        EntryType.ERASURE,
        EntryType.HOLD_PLACED,
        EntryType.HOLD_RELEASED,
        EntryType.AUDIT_GAP,
        EntryType.AUDIT_DISPOSED,
        EntryType.SIGNER_ROTATED,
    }
)


class Kind(StrEnum):
    """What a field's value may be.  Fractions are decimal strings: a float has no one spelling."""

    STRING = "string"
    INTEGER = "integer"
    BOOLEAN = "boolean"
    DECIMAL = "decimal string"
    STRINGS = "list of strings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    name: str
    kind: Kind
    meaning: str
    required: bool = True
    values: tuple[str, ...] = ()
    """The closed set a string is taken from; empty when it is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """One entry type: why it exists, and its fields."""

    reason: str
    fields: Mapping[str, Field]


def _text(name: str, meaning: str, *values: str) -> Field:
    return Field(name=name, kind=Kind.STRING, meaning=meaning, values=values)


def _count(name: str, meaning: str) -> Field:
    return Field(name=name, kind=Kind.INTEGER, meaning=meaning)


def _decimal(name: str, meaning: str) -> Field:
    return Field(name=name, kind=Kind.DECIMAL, meaning=meaning)


def _flag(name: str, meaning: str) -> Field:
    return Field(name=name, kind=Kind.BOOLEAN, meaning=meaning)


def _list(name: str, meaning: str) -> Field:
    return Field(name=name, kind=Kind.STRINGS, meaning=meaning)


def _maybe(*fields: Field) -> tuple[Field, ...]:
    return tuple(replace(field, required=False) for field in fields)


def _schema(reason: str, *fields: Field) -> Schema:
    return Schema(reason=reason, fields=MappingProxyType({field.name: field for field in fields}))


def _payload(what: str) -> tuple[Field, ...]:
    return (
        _text("payload_commitment", f"keyed commitment (HMAC-SHA256, hex) to {what}"),
        _text("payload_digest", "SHA-256 of its nonce and ciphertext, hex; in mode `encrypted`"),
        _text("payload_key", "id of the tenant's key, as it was when this was written"),
    )


_REQUEST_ID = _text("request_id", "the request, as named by the gateway; never reused")
_MADE_BY = _text("made_by", "key or subject of the tenant that made the key; missing: an admin did")
_TENANT = _text("tenant", "tenant the key belongs to")
_KEY_ID = _text(
    "key_id", "public part of the API key; `jwt:` or `cert:` and a digest for tokens and certificates"
)
_ROUTE = _text("route", "route of the API, such as `/v1/chat/completions`")
_MODEL = _text("model", "served model name")
_WORKER = _text("worker", "id of the worker")
_FILE = _text("file", "id of the file")
_BATCH = _text("batch", "id of the batch")
_GATEWAY = _text("gateway", "gateway that writes, by the name it keeps; it ends what it began")
_WEIGHTS = _text("weights", "digest of the target model's weights")
_DRAFT = _text("draft", "digest of the draft model's weights")
_ENGINE = _text("engine", "engine name and version")
_ACTOR = _text(
    "actor", "who did it: an admin key id, `console:` and one, or `cli:` and the operating-system account"
)
_CLIENT = _text("client", "class of the client's address", "loopback", "private", "public", "unknown")
_STATUS = _count("status", "HTTP status that the client got, or would have got")
_EXIT_CODE = _count("exit_code", "exit status of the process; minus the number of the signal that ended it")
_REASON = _text("reason", "why, in the operator's words, at most 200 characters")
_APPROVED_BY = _text("approved_by", "second administrator, under the two-person rule (`audit.two_person`)")
_PAYLOAD_LIMITS = (
    _count("payload_bytes", "bytes of the answer that the commitment is to"),
    _flag("payload_truncated", "whether the answer was longer, and only its beginning was kept"),
    _flag("payload_lost", "whether the content could not be kept although the tenant's mode requires it"),
)
_CHANGES = _list("changes", "names of what changed; never the values")
_ACCEPTANCE_LENGTH = _decimal(
    "acceptance_length", "mean tokens per draft with the bonus token, three decimal places"
)

REGISTRY: Mapping[EntryType, Schema] = MappingProxyType(
    {
        EntryType.REQUEST_INTENT: _schema(
            "Proves that a request was accepted before any byte of its answer was sent; without it a request "
            "could be served and never recorded.",
            _REQUEST_ID,
            _TENANT,
            _KEY_ID,
            _ROUTE,
            _MODEL,
            _flag("stream", "whether the client asked for a stream"),
            _CLIENT,
            _count("body_bytes", "size of the request body"),
            _text(
                "content_mode",
                "kept content: `none`, `digest` (keyed commitments) or `encrypted` (all of it)",
                *("none", "digest", "encrypted"),
            ),
            *_maybe(
                _WORKER,
                _GATEWAY,
                _text("client_request_id", "the client's own id of the request"),
                _text(
                    "batch",
                    "batch it is a line of; its `custom_id` is the client's own id, if short and plain",
                ),
                _count("batch_line", "line of the batch's input file, from 1"),
                *_payload("the request body as received"),
            ),
        ),
        EntryType.REQUEST_OUTCOME: _schema(
            "The end of an accepted request, what served it and its cost; together with the intent it makes "
            "completeness verifiable.  Most fields are missing if no worker answered.",
            _REQUEST_ID,
            _TENANT,
            _KEY_ID,
            _ROUTE,
            _MODEL,
            _text(
                "outcome",
                "how it ended",
                *("completed", "client_gone", "worker_failed", "worker_refused", "timed_out", "not_admitted"),
            ),
            _STATUS,
            _count("duration_ms", "from the request's arrival to its end"),
            *_maybe(
                _WORKER,
                _WEIGHTS,
                _DRAFT,
                _ENGINE,
                _text("speculation_mode", "the worker's speculation mode during the request"),
                _text("speculation_reason", "why the worker was in that mode"),
                _ACCEPTANCE_LENGTH,
                _count("prompt_tokens", "tokens of the prompt"),
                _count("completion_tokens", "tokens of the answer"),
                _flag("tokens_estimated", "whether the counts are estimates because the worker sent none"),
                _count("draft_tokens", "tokens the draft model proposed"),
                _count("accepted_tokens", "draft tokens the target model accepted"),
                _count("drafts", "proposal rounds"),
                _text(
                    "answer_suspect",
                    "far fewer (`low`) or more (`high`) drafts were accepted than ever for this tenant and "
                    "prompt template: it may be garbled, or repeat itself",
                    *("low", "high"),
                ),
                _text("finish_reason", "why the model stopped"),
                _count("ttft_ms", "from the request's arrival to the first byte of the answer"),
                _count("retries", "workers tried before the one that answered"),
                _count(
                    "queued_ms", "time it waited for a worker with free capacity; missing if it did not wait"
                ),
                _text("template", "label of the prompt template: a keyed hash, never the template"),
                _text("context_bucket", "range of prompt lengths, in tokens, such as `1k-2k`"),
                _text(
                    "speculation_forbidden",
                    "what kept the request from workers with a draft",
                    *("tenant", "header", "parameter"),
                ),
                _list("verdicts", "policy verdicts that applied"),
                *_payload("the answer as it was sent"),
                *_PAYLOAD_LIMITS,
            ),
        ),
        EntryType.REQUEST_ABORTED: _schema(
            "Closes a request whose outcome could not be recorded, so that every intent has an end and every "
            "crash shows.",
            _REQUEST_ID,
            _text(
                "reason",
                "`gateway_stopped`: it stopped first; `gateway_failed`: a defect or the log prevented an "
                "answer; `entry_not_durable`: the log could not be written",
                *("gateway_stopped", "gateway_failed", "entry_not_durable"),
            ),
            *_maybe(*_payload("the part of the answer that was sent"), *_PAYLOAD_LIMITS),
        ),
        EntryType.REQUEST_DENIED: _schema(
            "Records that a known caller's request was refused before it reached a worker: policy, limits.",
            _REQUEST_ID,
            _ROUTE,
            _text("reason", "error code that the client got"),
            _STATUS,
            *_maybe(_TENANT, _KEY_ID, _CLIENT),
        ),
        EntryType.CALLERS_REFUSED: _schema(
            "Counts requests without a valid credential, or with one for another purpose.  Anyone can send "
            "them, so a gateway writes one entry a minute for each surface, whatever their number.",
            _text("surface", "what they tried to use", "api", "admin", "console"),
            _count("count", "how many"),
            _list("reasons", "how many by reason, such as `api_key: 12`; the reasons of the metric"),
            _list("clients", "how many by class of the client's address, such as `private: 12`"),
            _text("since", "when the first of them was refused, as `time`"),
            _text("until", "when the last of them was refused, as `time`"),
        ),
        EntryType.CONSOLE_LOGIN: _schema(
            "An operator logged in to the console, where the log and all tenants can be read.",
            _KEY_ID,
            _CLIENT,
        ),
        EntryType.FILE_CREATED: _schema(
            "A tenant stored a file, or a batch wrote one: its content is on a disk from now on.",
            _TENANT,
            _KEY_ID,
            _FILE,
            _text("purpose", "requests of a batch, or its results", "batch", "batch_output"),
            _count("bytes", "its size before encryption"),
            _flag("encrypted", "whether it is encrypted on disk, under a key of its own"),
            *_maybe(_BATCH),
        ),
        EntryType.FILE_DELETED: _schema(
            "A file was deleted, with its key if it had one; written before its bytes are removed, and again "
            "if a crash interrupted that.",
            _TENANT,
            _FILE,
            _text(
                "reason",
                "why: its tenant deleted it, it expired, the tenant's content was erased, or the tenant's "
                "quota was exceeded",
                *("deleted", "expired", "erased", "refused"),
            ),
            *_maybe(_KEY_ID),
        ),
        EntryType.BATCH_CREATED: _schema(
            "A batch of requests was submitted under this key; their intents name the batch.",
            _TENANT,
            _KEY_ID,
            _BATCH,
            _text("file", "id of the file with its requests"),
            _ROUTE,
        ),
        EntryType.BATCH_ENDED: _schema(
            "The end of a batch and its result files; written before they can be read, and again if a crash "
            "interrupted that.",
            _TENANT,
            _BATCH,
            _text("outcome", "how it ended", "completed", "failed", "expired", "cancelled"),
            _count("requests", "requests in its input, as far as counted"),
            _count("completed", "requests that were answered"),
            _count("failed", "requests that were refused, failed, or did not finish"),
            *_maybe(
                _text("output_file", "id of the file with the answers"),
                _text("error_file", "id of the file with the errors"),
            ),
        ),
        EntryType.SPECULATION_CHANGED: _schema(
            "The speculation mode of a worker changed; links later outcomes to the decision.",
            _WORKER,
            _MODEL,
            _text("mode", "speculation mode from now on"),
            _text("reason", "why it was changed"),
            *_maybe(
                _text("previous_mode", "speculation mode until now"),
                _list("table", "draft tokens by batch size from now on, such as `1-8: 3`"),
                _flag(
                    "avoided", "whether other workers are preferred, because this one cannot be controlled"
                ),
                _ACCEPTANCE_LENGTH,
                _count("drafts", "drafts in the window that was judged"),
            ),
        ),
        EntryType.SPECULATION_OVERRIDDEN: _schema(
            "An operator set an override, or removed it; without it, a mode set by hand would look like "
            "one that the monitor chose.  Written before the override is in force.",
            _ACTOR,
            _text("worker", "id of the worker, or `*` for all"),
            _text("mode", "mode of the override; `auto` removes it", "speculative", "target_only", "auto"),
            *_maybe(
                _count("draft_tokens", "draft tokens of the override"),
                _text("until", "when the override ends by itself, as `time`"),
                _text("note", "why, in the operator's words, at most 200 characters"),
            ),
        ),
        EntryType.WORKER_STARTED: _schema(
            "Binds the requests that a worker serves from now on to the weights and engine it loaded.",
            _WORKER,
            _MODEL,
            _WEIGHTS,
            _ENGINE,
            _text("speculation_method", "how drafts are made; `none` for the target alone"),
            *_maybe(_DRAFT, _list("draft_lint", "rules of `appliance draft lint` that reported a finding")),
        ),
        EntryType.WORKER_STOPPED: _schema(
            "A worker stopped on request.",
            _WORKER,
            _text("reason", "why it was stopped"),
            *_maybe(_EXIT_CODE),
        ),
        EntryType.WORKER_RECYCLED: _schema(
            "A worker was restarted on purpose; explains the gap between its stop and its next start.",
            _WORKER,
            _text("reason", "why it was recycled"),
            *_maybe(
                _flag("with_draft", "whether it was started with its draft this time"),
                _text("canary", "whether its answers were then right; missing before", "passed", "failed"),
                _ACTOR,
                _text("note", "why, in the operator's words, at most 200 characters"),
            ),
        ),
        EntryType.WORKER_DRAINED: _schema(
            "An operator drained a worker, or ended that; explains why other workers took its load.  The "
            "gateway that gets the command writes it before it takes effect.",
            _WORKER,
            _flag("drained", "whether it gets no new requests from now on"),
            _ACTOR,
            *_maybe(_text("note", "why, in the operator's words, at most 200 characters")),
        ),
        EntryType.WORKER_FAILED: _schema(
            "A worker ended or stopped answering by itself: the failure record that regulators require.",
            _WORKER,
            _text("reason", "how the failure was detected"),
            *_maybe(_EXIT_CODE),
        ),
        EntryType.DRAFT_IMPORTED: _schema(
            "A draft model entered the registry, imported or trained here; from now on it can be deployed.",
            _DRAFT,
            _text("target", "digest of the target model it was made for"),
            _text("signer", "key its revision was signed with"),
            _ACTOR,
            *_maybe(
                _text("parent", "digest of the draft model its training started from"),
                _text("dataset", "digest of the manifest of the data it was trained on"),
                _text("record", "digest (SHA-256, hex) of its training record"),
            ),
        ),
        EntryType.DRAFT_HARVESTED: _schema(
            "Kept content of tenants was read to train a draft: a further use of personal data, with its "
            "permission.  Written twice: before anything is read, and with the counts at the end.",
            _text("stage", "before reading, or after the data set is complete", "begun", "done"),
            _list("tenants", "tenants whose policy allows it and whose content was read"),
            _text("policy", "the permission and content mode that every tenant had"),
            _ACTOR,
            *_maybe(
                _text("dataset", "digest of the manifest of the samples"),
                _count("samples", "number of samples"),
                _count("tokens", "tokens of the samples"),
                _text("purpose", "why, in the operator's words, at most 200 characters"),
            ),
        ),
        EntryType.DRAFT_TRAINED: _schema(
            "A draft model was trained on this site; links it to its data and its parent.",
            _DRAFT,
            _text("target", "digest of the target model it was trained for"),
            _text("record", "digest (SHA-256, hex) of its training record"),
            _text("recipe", "tool and version that trained it"),
            _ACTOR,
            *_maybe(
                _text("parent", "digest of the draft model the training started from"),
                _text("dataset", "digest of the manifest of the data it was trained on"),
                _count("samples", "requests of the data set that were used"),
                _count("missing", "requests of the data set that had been erased, and were not used"),
            ),
        ),
        EntryType.DRAFT_EVALUATED: _schema(
            "A draft model was compared with the one in service, before it serves any request.",
            _DRAFT,
            _text("previous_draft", "digest of the draft model it was compared with; `none` for none"),
            _text("verdict", "whether a canary may run", "passed", "refused"),
            _text("evaluation", "digest (SHA-256, hex) of the report"),
            _ACTOR,
            *_maybe(
                _text("reason", "why it was refused"),
                _decimal("acceptance_length", "mean tokens per draft of the new one, bonus token included"),
                _decimal("previous_acceptance_length", "the same of the one in service"),
                _decimal("speed_ratio", "tokens per engine second, the new one over the one in service"),
                _count("mismatches", "greedy answers that differed from the target's own beyond rounding"),
            ),
        ),
        EntryType.DRAFT_TRIED: _schema(
            "One step of a promotion, with the numbers behind the decision.",
            _text("promotion", "id of the promotion"),
            _text(
                "step",
                "what was done or decided",
                *("begun", "canary", "trial", "rollout", "refused", "interrupted", "failed"),
            ),
            _DRAFT,
            _ACTOR,
            *_maybe(
                _text("previous_draft", "digest of the draft model in service before; `none` for none"),
                _WORKER,
                _text("reason", "why, if it did not continue"),
                _count("drafts", "drafts of the new one in the trial"),
                _decimal("acceptance_length", "mean tokens per draft of the new one in the trial"),
                _decimal("previous_acceptance_length", "the same of the one in service, over the same time"),
                _decimal("speed_ratio", "tokens per engine second, the new one over the one in service"),
            ),
        ),
        EntryType.DRAFT_PROMOTED: _schema(
            "A new draft model was deployed: the change record, and the reference for a rollback.",
            _MODEL,
            _DRAFT,
            _ACTOR,
            *_maybe(
                _text("previous_draft", "digest of the draft model it replaces"),
                _text("evaluation", "digest of the evaluation report it was promoted on"),
            ),
        ),
        EntryType.DRAFT_ROLLED_BACK: _schema(
            "A draft model was rolled back.",
            _MODEL,
            _text("draft", "digest of the draft model now in service; `none` for the target alone"),
            _text("previous_draft", "digest of the draft model taken out"),
            _text("reason", "why"),
            *_maybe(_ACTOR),
        ),
        EntryType.TENANT_CREATED: _schema(
            "A tenant was created: access control must be reconstructible.",
            _text("tenant", "the new tenant"),
            _list("models", "models it may use; `*` for all"),
            _ACTOR,
        ),
        EntryType.TENANT_CHANGED: _schema(
            "Limits, models or policy of a tenant changed, or one of its keys.",
            _TENANT,
            _CHANGES,
            _ACTOR,
            *_maybe(
                _list("limits", "limits of the key from now on; missing: those of a key did not change"),
                _flag(
                    "manage_keys", "whether the key may make keys from now on; missing: that did not change"
                ),
            ),
        ),
        EntryType.TENANT_DELETED: _schema(
            "A tenant was deleted; a later tenant of the same name is a different one.", _TENANT, _ACTOR
        ),
        EntryType.KEY_CREATED: _schema(
            "An API key was created; every request names its key.",
            _TENANT,
            _KEY_ID,
            _flag("admin", "whether it is for the admin API"),
            _ACTOR,
            *_maybe(
                _list("scopes", "what an admin key may do; missing: everything"),
                _list("limits", "limits of the key, such as `requests_per_minute=60`; missing: none"),
                _flag("manage_keys", "whether it may make keys of its tenant; missing: no"),
                _MADE_BY,
            ),
        ),
        EntryType.KEY_REVOKED: _schema(
            "The key is invalid from now on; a later request with it would be a finding.",
            _TENANT,
            _KEY_ID,
            _ACTOR,
            *_maybe(_text("reason", "why"), _MADE_BY),
        ),
        EntryType.KEY_ROTATED: _schema(
            "A key was replaced; links the requests of the old and the new key.",
            _TENANT,
            _KEY_ID,
            _text("previous_key_id", "public part of the key it replaces"),
            _ACTOR,
            *_maybe(_MADE_BY),
        ),
        EntryType.TENANTS_SEALED: _schema(
            "Announces the state of all tenants and keys before the database has it, so that a state that no "
            "entry announced is a finding.  If several have one generation, the database has one of them.",
            _count("generation", "number of changes so far"),
            _text(
                "digest", "digest (SHA-256, hex) of all rows of tenants and keys, which do not hold the keys"
            ),
            _ACTOR,
        ),
        EntryType.CONFIG_CHANGED: _schema(
            "The settings of the appliance changed.",
            _text("digest", "digest of the settings now in force"),
            _CHANGES,
            _ACTOR,
            *_maybe(_text("previous_digest", "digest of the settings before")),
        ),
        EntryType.AUDIT_STARTED: _schema(
            "A gateway opened the log, found it valid, and closed what a crash left open.",
            _text("version", "version of the appliance"),
            _count("recovered", "intents without outcome that were closed with `request.aborted`"),
            _count("tree_size", "size of the tree then"),
            *_maybe(
                _GATEWAY,
                _text(
                    "wall",
                    "what the kernel lets the gateway and its worker connect to, or why it is not restricted",
                ),
            ),
        ),
        EntryType.AUDIT_READ: _schema(
            "Reading the log is itself an access to personal data, and is recorded.",
            _ACTOR,
            _text("operation", "what was done", "tail", "show", "receipt", "export", "open", "check"),
            *_maybe(
                _count("start", "index of the first entry read"),
                _count("end", "index after the last entry read"),
                _text("purpose", "why, in the reader's words"),
                _text("key_id", "admin key it was recorded with; missing if the command wrote it itself"),
            ),
        ),
        EntryType.AUDIT_SPOOLED: _schema(
            "Entries before it waited on a gateway's disk while the database took none; explains times that "
            "go back.",
            _text("reason", "why the database could not take them"),
            _count("entries", "entries that waited, including those that the database turned out to have"),
            _text("since", "when the first of them was kept, as `time`"),
            _text("until", "when the last of them had been handed over, as `time`"),
            _text("spool", "id of the spool; each is reported once"),
        ),
        EntryType.AUDIT_GAP: _schema(
            "Admits that entries are missing, how many, and from when; the verifier reports the log as "
            "incomplete.",
            _text("reason", "why entries could not be written"),
            _count("entries", "entries that were lost"),
            _text("since", "when it began, as `time`"),
            _text("until", "when it ended, as `time`"),
        ),
        EntryType.AUDIT_DISPOSED: _schema(
            "Entries were disposed of after their retention; explains why they are gone while every proof of "
            "the others still verifies.  Written, signed and cosigned before any of them is removed.",
            _count("below", "entries with a smaller index are disposed of; a multiple of 256"),
            _count("previous", "the same of the disposal before; 0 for none"),
            _text("root", "root of the tree over the entries below, in base64"),
            _text("newest", "latest `time` of the entries that this disposal removes"),
            _count("exported", "entries that the largest export before it covers"),
            _text("legal_basis", "the duty or rule it follows"),
            _ACTOR,
            *_maybe(
                _count("witnessed", "entries that every configured witness had cosigned; missing for none"),
                _count("forwarded", "entries that the SIEM had; missing if the log is not forwarded"),
            ),
        ),
        EntryType.ERASURE: _schema(
            "Payload keys were destroyed; explains why payloads can no longer be decrypted while every proof "
            "still verifies.",
            _TENANT,
            _count("payloads", "payloads that can no longer be decrypted"),
            _text("legal_basis", "the duty or request it fulfils"),
            _ACTOR,
            *_maybe(
                _list("requests", "requests whose content was erased, if few"),
                _text("before", "otherwise all content of the tenant's requests from before this `time`"),
                _flag(
                    "everything",
                    "whether all of the tenant's content was erased that an entry before this one names, "
                    "whatever `before` and the clocks said",
                ),
                _count(
                    "before_index",
                    "of the requests from `before`, only those whose intent has a smaller index: those "
                    "that the log recorded before it had reached that time",
                ),
                _list("keys", "ids of the tenant's keys that were destroyed, if few"),
                _APPROVED_BY,
            ),
        ),
        EntryType.HOLD_PLACED: _schema(
            "Nothing of the tenant may be erased from now on; an erasure under a hold is a finding.",
            _TENANT,
            _REASON,
            _ACTOR,
        ),
        EntryType.HOLD_RELEASED: _schema(
            "Ends a legal hold; the tenant's content can be erased again.",
            _TENANT,
            _REASON,
            _ACTOR,
            *_maybe(_APPROVED_BY),
        ),
        EntryType.APPROVAL_REQUESTED: _schema(
            "An administrator requested what a second one has to approve; its `id` names the request.",
            _text(
                "operation",
                "erase content of a tenant, prune content of all tenants, or release a legal hold",
                *("erase", "prune", "release"),
            ),
            _ACTOR,
            *_maybe(
                _TENANT,
                _list("requests", "requests whose content is to be erased; missing: not by name"),
                _text(
                    "before",
                    "content from before this `time`; missing without `requests`: all of the tenant's",
                ),
                _text("legal_basis", "the duty or request that an erasure fulfils"),
                _REASON,
            ),
        ),
        EntryType.APPROVAL_CLOSED: _schema(
            "A request was approved or withdrawn, by whom.  Written before it is carried out, and again if "
            "that failed and it was approved again.",
            _text("approval", "`id` of the `approval.requested` entry"),
            _text("outcome", "what was decided", "approved", "withdrawn"),
            _ACTOR,
        ),
        EntryType.EGRESS_ATTESTED: _schema(
            "A gateway tried to reach the outside: the evidence for sovereignty.  Each gateway attests for "
            "itself.",
            _text(
                "result",
                "`closed`: every attempt failed, and the control succeeded; `open`: an attempt succeeded; "
                "`inconclusive`: neither was shown",
                *("closed", "open", "inconclusive"),
            ),
            _text("trigger", "what triggered the check", "start", "schedule", "request"),
            _count("attempts", "egress attempts made"),
            _list("outcomes", "each attempt and its result, such as `tcp 192.0.2.1:443 timed_out`"),
            _text("control", "the listener inside the network that had to be reached, and the result"),
            _flag("wall", "whether Landlock keeps the gateway itself from connecting to other ports"),
            _text("host", "name of the machine, container or pod"),
            _text("settings", "digest (SHA-256, hex) of the settings it was made under"),
            _text("report", "digest (SHA-256, hex) of the full report"),
            _GATEWAY,
            *_maybe(_ACTOR),
        ),
        EntryType.BUNDLE_INSTALLED: _schema(
            "Software or weights were installed: the supply-chain record.",
            _text("bundle", "name of the bundle"),
            _text("version", "version of the bundle"),
            _text("digest", "digest of its manifest"),
            _ACTOR,
            *_maybe(_text("signer", "key its signature was checked with")),
        ),
        EntryType.SIGNER_ROTATED: _schema(
            "The old key's last signature: names the key that signs from now on.",
            _text(
                "previous_key", "verifier key until now; of an ML-DSA-44 key `name+id+sha256:` and its hash"
            ),
            _text("key", "verifier key from the next checkpoint on, in the same form"),
            _text("signature", "of the old key, over these fields, in base64"),
            _ACTOR,
        ),
    }
)
