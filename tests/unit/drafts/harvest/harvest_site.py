"""
A site with kept content: a real database, real keys and a real log, and requests put into it by hand.

Erasing goes through the gateway's own retention.  The tokenizer is a small one that can be reasoned
about: a letter is a token, and so is each special word.
"""

import asyncio
import json
import random
import re
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.audit.content.keeper import Keeper
from appliance.audit.content.payload_keys import PayloadKeys, Purpose
from appliance.audit.content.payloads import Payload
from appliance.audit.content.retention import Erased, Erasure, Retention
from appliance.audit.content.samples import SqlSampleStore
from appliance.audit.content.sealing import Part, place, seal
from appliance.audit.entry import JSON, Entry, encode, format_time, new_entry_id
from appliance.audit.entry_types import EntryType
from appliance.audit.merkle import CompactRange, hash_leaf
from appliance.audit.pending import Receipt
from appliance.audit.store import Head, Leaf, SqlAuditStore
from appliance.drafts.harvest.content_vault import ContentVault
from appliance.drafts.harvest.conversation import Skipped
from appliance.drafts.harvest.rendering import render
from appliance.drafts.harvest.sample import TrainingSample
from appliance.infra.data_directory import locate
from appliance.infra.settings import AuditSettings, DataSettings, Settings
from appliance.tenancy import ContentPolicy, Permission, Tenant
from appliance.tenancy.store import open_tenant_store
from tests.clock import Clock

ORIGIN = "site.example/audit"
START = 1_800_000_000.0
WEIGHTS = f"sha256:{'7' * 64}"
TOKENIZER = f"sha256:{'5' * 64}"
MODEL = "demo"
SPECIAL = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|call|>")
ALLOWING = frozenset({Permission.TRAIN_DRAFTS})


class LetterTokenizer:
    """A letter is its code point, moved past the special words; can be wrong in known ways."""

    eos_token_id: int | None = 1

    def __init__(self, *, merges: bool = False, lists: bool = False, prefix: str = "") -> None:
        self._merges = merges
        """Whether `ab` is one token when it is encoded, which a model may have generated as two."""
        self._lists = lists
        """Whether the template takes contents as lists only."""
        self._prefix = prefix
        """What the template puts before everything."""

    def apply_chat_template(self, conversation: list[dict[str, Any]], **more: Any) -> list[int]:
        """As the demo's template: a word for the role, the text, and the end of the turn."""
        assert more["tokenize"] is True
        assert more["return_dict"] is False
        text = SPECIAL[0] + self._prefix
        if more["tools"]:
            text += json.dumps(more["tools"])
        if "flavour" in more:
            text += more["flavour"]
        for message in conversation:
            content = message["content"]
            if self._lists:
                content = "|".join(part["text"] for part in content)
            text += f"<|{message['role']}|>{content + ''}"
            for call in message.get("tool_calls", ()):
                text += "<|call|>" + call["function"]["name"] + json.dumps(call["function"]["arguments"])
            text += SPECIAL[1]
        if more["add_generation_prompt"]:
            text += "<|assistant|>"
        return self.encode(text, add_special_tokens=False)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        tokens = [0] if add_special_tokens else []
        for piece in re.split(f"({'|'.join(map(re.escape, SPECIAL))}|ab)", text):
            if piece in SPECIAL:
                tokens.append(SPECIAL.index(piece))
            elif piece == "ab" and self._merges:
                tokens.append(9)
            else:
                tokens += [ord(letter) + 10 for letter in piece]
        return tokens

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str:
        assert not skip_special_tokens
        assert not clean_up_tokenization_spaces
        return "".join(
            chr(token - 10) if token >= 10 else "ab" if token == 9 else SPECIAL[token] for token in token_ids
        )


class LetterChild:
    """`harvest.tokenizer.TargetTokenizer` without its process."""

    def __init__(self, tokenizer: LetterTokenizer | None = None) -> None:
        self.tokenizer = tokenizer or LetterTokenizer()
        self.asked = 0

    def tokenize(self, conversation, *, prompt_tokens, completion_tokens):
        self.asked += 1
        asked, answer = conversation.prompt, conversation.answer
        job = {
            "messages": asked.messages,
            "tools": asked.tools,
            "arguments": asked.arguments,
            "text": asked.text,
            "tokens": None if asked.tokens is None else list(asked.tokens),
            "answer": answer.text,
            "end": answer.end,
            "stop": answer.stop,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
        }
        said = render(self.tokenizer, job)
        if "skipped" in said:
            return Skipped(said["skipped"])
        return tuple(said["prompt"]), tuple(said["answer"])


@dataclass
class HarvestSite:
    """One site; made by `open_site`."""

    directory: Path
    log: SqlAuditStore
    store: SqlSampleStore
    keys: PayloadKeys
    vault: ContentVault
    clock: Clock
    random: random.Random
    slept: list[float] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"sqlite:///{self.directory / 'audit.db'}"

    @property
    def settings(self) -> Settings:
        return Settings(data=DataSettings(directory=self.directory), audit=AuditSettings(origin=ORIGIN))

    def record(self, entry_type: EntryType, **fields: JSON | None) -> int:
        """Append one entry; its index."""
        given = {name: value for name, value in fields.items() if value is not None}
        head = self.log.head()
        leaf = encode(
            Entry(
                log=ORIGIN,
                id=new_entry_id(int(self.clock() * 1000), self.random.randbytes(10)),
                type=entry_type,
                time=format_time(int(self.clock() * 1000)),
                fields=given,
            )
        )
        tree = CompactRange(head.size, head.subtrees)
        tree.append(hash_leaf(leaf))
        placed = Leaf(
            index=head.size,
            leaf=leaf,
            leaf_hash=hash_leaf(leaf),
            type=str(entry_type),
            request_id=fields.get("request_id"),
        )
        self.log.append([placed], expected=head, new=Head.of(tree))
        return head.size

    def keep(
        self,
        tenant: str,
        body: bytes = b"{}",
        answer: bytes = b"{}",
        *,
        route: str = "/v1/chat/completions",
        **outcome: JSON,
    ) -> str:
        """Keep one request with its answer and log it; returns its id."""
        self.clock.now += 1
        request_id = new_entry_id(int(self.clock() * 1000), self.random.randbytes(10))
        common = {
            "request_id": request_id,
            "tenant": tenant,
            "key_id": "abcd2345",
            "route": route,
            "model": MODEL,
        }
        more = {"stream": False, "client": "loopback", "body_bytes": len(body), "content_mode": "encrypted"}
        self.record(
            EntryType.REQUEST_INTENT, **common, **more, **self._seal(request_id, tenant, Part.REQUEST, body)
        )
        said = {
            "outcome": "completed",
            "status": 200,
            "duration_ms": 1,
            "prompt_tokens": 10,
            "completion_tokens": 5,
            "tokens_estimated": False,
            "template": "chat-00000001",
            "context_bucket": "0-1k",
            "weights": WEIGHTS,
            "finish_reason": "stop",
        }
        sealed = self._seal(request_id, tenant, Part.RESPONSE, answer)
        self.record(EntryType.REQUEST_OUTCOME, **common, **{**said, **outcome}, **sealed)
        return request_id

    def talk(self, tenant: str, prompt: str, answer: str, **outcome: JSON) -> str:
        """Keep a chat that a letter tokenizer counts as the worker did."""
        messages = [{"role": "user", "content": prompt}]
        choice = {"index": 0, "message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
        counted = {"prompt_tokens": len(prompt) + 4, "completion_tokens": len(answer) + 1}
        return self.keep(
            tenant,
            json.dumps({"model": MODEL, "messages": messages}).encode(),
            json.dumps({"choices": [choice]}).encode(),
            **{**counted, **outcome},
        )

    def erase(self, tenant: str, *requests: str, before_ms: int | None = None) -> Erased:
        """Erase as a gateway does."""
        self.clock.now += 1
        wanted = Erasure(
            tenant=tenant, requests=tuple(sorted(requests)), before_ms=before_ms, basis="a request"
        )

        async def run() -> Erased:
            async with self._keeper() as keeper:
                retention = Retention(log=self, keeper=keeper, clock=self.clock, signed_within_seconds=0)
                return await retention.erase(wanted, actor="admin")

        return asyncio.run(run())

    def resume(self) -> None:
        """Start a gateway: finish what a crash left."""

        async def run() -> None:
            async with self._keeper() as keeper:
                await Retention(log=self, keeper=keeper, clock=self.clock).resume()

        asyncio.run(run())

    async def append(self, entry_type: EntryType, /, **fields: JSON | None) -> Receipt:
        """The log, in the form that retention takes."""
        return Receipt(index=self.record(entry_type, **fields), entry_id="x")

    def tenants(self, *tenants: Tenant) -> None:
        """Make these the tenants of the site."""
        with closing(open_tenant_store(locate(self.settings))) as store:
            store.write(store.read(), tenants)

    def entries(self, *types: EntryType) -> list[dict[str, Any]]:
        """Members of the entries of these types."""
        leaves = self.log.leaves(0, 10_000)
        return [json.loads(leaf.leaf) for leaf in leaves if not types or leaf.type in types]

    def parts(self, request_id: str) -> set[Part]:
        """The stored parts of a request."""
        return {part for part in Part if self.store.get(request_id, part) is not None}

    def opens(self, request_id: str, part: Part = Part.SAMPLE) -> bool:
        """Whether an existing key wraps it."""
        payload = self.store.get(request_id, part)
        return payload is not None and self.keys.find(payload.key_id, Purpose.WRAPPING) is not None

    def _keeper(self) -> Any:
        return Keeper(
            store=self.store,
            keys=self.keys,
            settings=AuditSettings(origin=ORIGIN),
            clock=self.clock,
            random_bytes=self.random.randbytes,
        ).running()

    def _seal(self, request_id: str, tenant: str, part: Part, content: bytes) -> dict[str, str]:
        key = self.keys.current(tenant, Purpose.WRAPPING)
        where = place(ORIGIN, request_id, part)
        sealed, commitment = seal(content, where, key.key, random_bytes=self.random.randbytes)
        self.store.add(
            [
                Payload(
                    request_id=request_id,
                    part=part,
                    tenant=tenant,
                    key_id=key.key_id,
                    sealed=sealed,
                    time=format_time(int(self.clock() * 1000)),
                )
            ]
        )
        return {
            "payload_commitment": commitment,
            "payload_digest": sealed.digest,
            "payload_key": key.key_id,
        }


def open_site(directory: Path, *, seed: int = 17) -> HarvestSite:
    """Make or open a site; `close_site` ends it."""
    directory.mkdir(exist_ok=True)
    url, clock, chance = f"sqlite:///{directory / 'audit.db'}", Clock(START), random.Random(seed)
    log = SqlAuditStore(url)
    store = SqlSampleStore(url)
    keys = PayloadKeys(
        directory / "payload-keys", master_key=None, key_days=7, clock=clock, random_bytes=chance.randbytes
    )
    slept: list[float] = []
    vault = ContentVault(
        store=store,
        log=log,
        keys=keys,
        origin=ORIGIN,
        clock=clock,
        random_bytes=chance.randbytes,
        sleep=slept.append,
    )
    return HarvestSite(
        directory=directory,
        log=log,
        store=store,
        keys=keys,
        vault=vault,
        clock=clock,
        random=chance,
        slept=slept,
    )


def close_site(site: HarvestSite) -> None:
    """Close every connection."""
    site.store.close()
    site.log.close()


def allowing(name: str, **more: Any) -> Tenant:
    """A tenant that may be harvested."""
    return Tenant(name=name, **{"content": ContentPolicy.ENCRYPTED, "may": ALLOWING, **more})


def sample_of(request_id: str, tenant: str = "acme", **more: Any) -> TrainingSample:
    """A sample, without salt."""
    given: dict[str, Any] = {
        "request_id": request_id,
        "tenant": tenant,
        "template": "chat-00000001",
        "context": "0-1k",
        "token_ids": (3, 77, 88, 1),
        "loss_mask": (False, False, True, True),
        "tokenizer": TOKENIZER,
    }
    return TrainingSample(**{**given, **more})
