"""
The draft's cache ends up as if it had run at every step.

Two engines compute the same batches: in one the draft runs when vLLM runs it, in the other when it must.
Their drafts record what they would write to their KV caches.
"""

import copy
import itertools
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.serving.vllm.deferred_prefill import defer_draft_prefill

torch = pytest.importorskip("torch")

BLOCK = 4
"""Tokens of a block of the KV cache."""
BLOCKS = 256
BUFFER = 256
LAYERS = 3
Tensor = Any


@dataclass
class Metadata:
    """vLLM's `CommonAttentionMetadata`, as far as the draft's cache depends on it."""

    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    positions: Tensor = None
    is_prefilling: Tensor = None
    seq_lens_cpu_upper_bound: Tensor = None
    _num_computed_tokens_cache: Tensor = None
    _token_to_req_indices_cache: Tensor = None


@dataclass
class Request:
    """One request; its tokens are a function of its text, so both engines agree on them."""

    name: int
    text: int
    prompt: int
    computed: int = 0
    """Tokens the target has computed."""
    drafts: int = 0
    """Draft tokens to verify at the next step."""
    blocks: list[int] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Tokens of the prompt, or of what was lost to preemption, still to compute."""
        return max(0, self.prompt - self.computed)

    def slot(self, position: int) -> int:
        """The KV cache slot of a position."""
        return self.blocks[position // BLOCK] * BLOCK + position % BLOCK


@dataclass
class Row:
    """What one step computes of one request."""

    request: Request
    tokens: int
    accepted: int = 0


def token(text: int, position: int) -> int:
    return (text * 7919 + position * 104729) % 32000


class Drafter:
    """A draft that records what each slot of its cache is made of."""

    needs_extra_input_slots = False

    def __init__(self) -> None:
        self.cache: dict[int, tuple] = {}
        self.calls: list[tuple[int, int]] = []
        """Draft tokens asked for, and tokens run over, of each forward."""
        self.caught_up: list[int] = []
        """Tokens of those forwards that vLLM has not asked for."""

    def propose(
        self,
        num_speculative_tokens,
        target_token_ids,
        target_positions,
        target_hidden_states,
        next_token_ids,
        token_indices_to_sample,
        common_attn_metadata,
        sampling_metadata,
        mm_embed_inputs=None,
        num_rejected_tokens_gpu=None,
        slot_mappings=None,
    ):
        """Run over all tokens of a batch, as vLLM's `SpecDecodeBaseProposer.propose` does."""
        batch = common_attn_metadata
        starts = batch.query_start_loc.tolist()
        lengths = [end - start for start, end in itertools.pairwise(starts)]
        assert batch.query_start_loc_cpu.tolist() == starts
        assert batch.query_start_loc.dtype == torch.int32
        assert len(lengths) == batch.num_reqs == len(next_token_ids) == len(batch.seq_lens)
        assert batch.num_actual_tokens == starts[-1] == len(target_token_ids) <= BUFFER
        assert len(target_positions) == len(target_hidden_states) == len(batch.slot_mapping) == starts[-1]
        assert (batch.max_query_len, batch.max_seq_len) == (max(lengths), int(batch.seq_lens.max()))
        # Each token goes in with the one that follows it (vLLM: `set_inputs_first_pass`).
        following = [*target_token_ids.tolist()[1:], None]
        last = [end - 1 for end in starts[1:]]
        if token_indices_to_sample is not None:
            last = token_indices_to_sample.tolist()
        for index, given_token in zip(last, next_token_ids.tolist(), strict=True):
            following[index] = given_token
        positions, slots = target_positions.tolist(), batch.slot_mapping.tolist()
        for row, length in enumerate(lengths):
            blocks, seen = batch.block_table_tensor[row].tolist(), int(batch.seq_lens[row])
            for offset in range(length):
                index, position = starts[row] + offset, seen - length + offset
                assert positions[index] == position
                assert slots[index] == blocks[position // BLOCK] * BLOCK + position % BLOCK
                before = position - 1
                # What is attended to is part of what is kept, as in a draft of several layers.
                earlier = (
                    self.cache.get(blocks[before // BLOCK] * BLOCK + before % BLOCK) if position else None
                )
                hidden = tuple(target_hidden_states[index].tolist())
                self.cache[slots[index]] = (position, following[index], hidden, hash(earlier))
        self.calls.append((num_speculative_tokens, starts[-1]))
        if slot_mappings is None:
            self.caught_up.append(starts[-1])
        return torch.zeros((batch.num_reqs, num_speculative_tokens), dtype=torch.int64)


class Runner:
    """vLLM's runner around a draft: persistent buffers, and the way a step's arguments are made."""

    use_aux_hidden_state_outputs = True
    use_async_scheduling = False
    supports_mm_inputs = False
    max_num_reqs = 3

    def __init__(self, drafter: Drafter, max_num_tokens: int) -> None:
        self.drafter = drafter
        self.max_num_tokens = max_num_tokens
        self.kv_cache_config = SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=["full attention"])
        self.input_batch = SimpleNamespace(
            req_ids=[],
            block_table=[SimpleNamespace(block_size=BLOCK)],
            token_ids_cpu=torch.zeros((8, BLOCK * BLOCKS), dtype=torch.int32).numpy(),
        )
        self.input_ids = SimpleNamespace(gpu=torch.zeros(BUFFER, dtype=torch.int32))
        self.positions = torch.zeros(BUFFER, dtype=torch.int64)
        self.slots = torch.zeros(BUFFER, dtype=torch.int64)

    def _get_positions(self, count):
        return self.positions[:count]

    def propose_draft_token_ids(
        self,
        scheduler_output,
        sampled_token_ids,
        sampling_metadata,
        hidden_states,
        sample_hidden_states,
        aux_hidden_states,
        spec_decode_metadata,
        common_attn_metadata,
        slot_mappings,
    ):
        """Run the draft over everything the step has computed, rejected tokens too (padded batch)."""
        count = common_attn_metadata.num_actual_tokens
        return self.drafter.propose(
            num_speculative_tokens=scheduler_output.num_spec_tokens_to_schedule,
            target_token_ids=self.input_ids.gpu[:count],
            target_positions=self._get_positions(count),
            target_hidden_states=torch.cat([hidden[:count] for hidden in aux_hidden_states], dim=-1),
            next_token_ids=sampled_token_ids,
            token_indices_to_sample=spec_decode_metadata,
            common_attn_metadata=common_attn_metadata,
            sampling_metadata=sampling_metadata,
            mm_embed_inputs=None,
            num_rejected_tokens_gpu=None,
            slot_mappings=slot_mappings,
        )


class FakeEngine:
    """A target with its draft, computing batches."""

    def __init__(
        self,
        *,
        lazy: bool,
        max_num_tokens: int = BUFFER,
        runner: type["Runner"] = Runner,
        drafter: type = Drafter,
    ) -> None:
        runner_class = type("Runner", (runner,), {})
        drafter_class = type("Drafter", (drafter,), {})
        if lazy:
            defer_draft_prefill(runner_class, drafter_class, torch)
        self.drafter = drafter_class()
        self.runner = runner_class(self.drafter, max_num_tokens)
        self.requests: dict[int, Request] = {}
        self.free = list(range(BLOCKS))

    @property
    def cache(self) -> dict[int, tuple]:
        return self.drafter.cache

    @property
    def deferred(self) -> int:
        """Slots of running requests that the draft has not been run over."""
        deferred = getattr(self.runner, "appliance_deferred", None)
        if deferred is None or deferred._is_deferred is None:
            return 0
        places = {
            request.slot(position)
            for request in self.requests.values()
            for position in range(request.computed)
        }
        return int(deferred._is_deferred[sorted(places)].sum()) if places else 0

    def add(self, name: int, prompt: int = 3) -> None:
        self.requests[name] = Request(name=name, text=name, prompt=prompt)

    def share(self, name: int, other: int) -> None:
        """Add a request with the prefix of another one: its full blocks are in the prefix cache."""
        held = self.requests[other]
        full = (held.computed - 1) // BLOCK
        self.requests[name] = Request(
            name=name,
            text=held.text,
            prompt=held.computed,
            computed=full * BLOCK,
            blocks=held.blocks[:full],
        )

    def _let_go(self, blocks: list[int]) -> None:
        held = {block for request in self.requests.values() for block in request.blocks}
        self.free = [block for block in blocks if block not in held] + self.free

    def finish(self, name: int) -> None:
        """Remove a request; its blocks are reused first, so that a mistake shows."""
        self._let_go(self.requests.pop(name).blocks)

    def preempt(self, name: int) -> None:
        """Free a request's blocks; it will be computed again."""
        request = self.requests[name]
        self.requests[name] = Request(name=name, text=request.text, prompt=request.computed)
        self._let_go(request.blocks)

    def step(self, rows: list[tuple[int, int, int]], k: int, **odd: Any) -> Any:
        """
        Compute one batch and hand it to the draft.

        Args:
            rows: name, most tokens of a prompt at once, and accepted draft tokens of each request.
            k: draft tokens to ask for.
            odd: arguments of `propose_draft_token_ids` that are other than usual.
        """
        batch = []
        for name, chunk, accepted in rows:
            request = self.requests[name]
            tokens = min(chunk, request.left) or 1 + request.drafts
            batch.append(Row(request=request, tokens=tokens, accepted=min(accepted, request.drafts)))
            while len(request.blocks) * BLOCK < request.computed + tokens:
                request.blocks.append(self.free.pop(0))
        arguments = self._arguments(batch, k) | odd
        answer = self.runner.propose_draft_token_ids(*arguments.values())
        for row in batch:
            request = row.request
            was_prompt = request.left > 0
            request.computed += row.tokens if was_prompt else 1 + row.accepted
            request.drafts = 0 if request.left else k
        return answer

    def _arguments(self, batch: list[Row], k: int) -> dict[str, Any]:
        runner = self.runner
        runner.input_batch.req_ids = [str(row.request.name) for row in batch]
        for number, row in enumerate(batch):
            # What is not computed yet is not known either, apart from the token that comes next.
            known = max(row.request.computed + 1, row.request.prompt)
            texts = [token(row.request.text, position) for position in range(known)]
            runner.input_batch.token_ids_cpu[number, :known] = texts
            runner.input_batch.token_ids_cpu[number, known:] = 0
        ids, where, slots, sampled, last, starts = [], [], [], [], [], [0]
        for row in batch:
            request, start = row.request, row.request.computed
            kept = row.tokens if request.left else 1 + row.accepted
            for offset in range(row.tokens):
                # A draft token that will be rejected is not the one that belongs there.
                wrong = 0 if offset < kept else 1
                ids.append(token(request.text, start + offset) + wrong)
                where.append(start + offset)
                slots.append(request.slot(start + offset))
            sampled.append(token(request.text, start + kept))
            last.append(starts[-1] + kept - 1)
            starts.append(starts[-1] + row.tokens)
        count = starts[-1]
        # Buffers are written in place, step for step: whatever was noted must be a copy.
        runner.input_ids.gpu[:count] = torch.tensor(ids, dtype=torch.int32)
        runner.positions[:count] = torch.tensor(where)
        runner.slots[:count] = torch.tensor(slots)
        hidden = torch.tensor(
            [[row.request.text, row.request.computed + at] for row in batch for at in range(row.tokens)],
            dtype=torch.float32,
        )
        lengths = [row.request.computed + row.tokens for row in batch]
        tables = torch.full((len(batch), BLOCKS), -1, dtype=torch.int32)
        for number, row in enumerate(batch):
            tables[number, : len(row.request.blocks)] = torch.tensor(row.request.blocks)
        boundaries = torch.tensor(starts, dtype=torch.int32)
        return {
            "scheduler_output": SimpleNamespace(
                num_spec_tokens_to_schedule=k,
                total_num_scheduled_tokens=count,
                scheduled_spec_decode_tokens={row.request.name: [0] for row in batch if row.request.drafts},
            ),
            "sampled_token_ids": torch.tensor(sampled),
            "sampling_metadata": None,
            "hidden_states": hidden,
            "sample_hidden_states": hidden,
            "aux_hidden_states": [hidden + layer / 4 for layer in range(LAYERS)],
            # vLLM makes one at every step of an engine with a draft, also where there is nothing to verify.
            "spec_decode_metadata": torch.tensor(last),
            "common_attn_metadata": Metadata(
                query_start_loc=boundaries,
                query_start_loc_cpu=boundaries.clone(),
                seq_lens=torch.tensor(lengths, dtype=torch.int32),
                num_reqs=len(batch),
                num_actual_tokens=count,
                max_query_len=max(row.tokens for row in batch),
                max_seq_len=max(lengths),
                block_table_tensor=tables,
                slot_mapping=runner.slots[:count],
                positions=runner.positions[:count],
            ),
            "slot_mappings": {},
        }


class Pair:
    """Two engines that compute the same batches."""

    def __init__(self, *names: int, max_num_tokens: int = BUFFER) -> None:
        self.eager = FakeEngine(lazy=False)
        self.lazy = FakeEngine(lazy=True, max_num_tokens=max_num_tokens)
        for name in names:
            self.do("add", name)
        if names:
            self.step(0)

    def do(self, what: str, *how: Any) -> None:
        for engine in (self.eager, self.lazy):
            getattr(engine, what)(*how)

    def step(self, k: int, rows: list[tuple[int, int, int]] | None = None, **odd: Any) -> None:
        """Compute the same batch in both engines; all requests by default."""
        rows = rows or [(name, BUFFER, 0) for name in self.lazy.requests]
        answers = [engine.step(rows, k, **copy.copy(odd)) for engine in (self.eager, self.lazy)]
        assert answers[0].shape == answers[1].shape == (len(rows), k)
        assert answers[0].dtype == answers[1].dtype

    def differences(self) -> list[tuple[int, int]]:
        """Requests and positions at which the two caches differ."""
        return [
            (name, position)
            for name, request in self.lazy.requests.items()
            for position in range(request.computed)
            if self.lazy.cache.get(request.slot(position)) != self.eager.cache.get(request.slot(position))
        ]

    @property
    def forwards(self) -> tuple[int, int]:
        """Runs of each draft."""
        return len(self.eager.drafter.calls), len(self.lazy.drafter.calls)


def test_a_step_that_drafts_nothing_does_not_run_the_draft():
    """Neither for prompts nor after them."""
    pair = Pair(1, 2)
    for _ in range(50):
        pair.step(0)
    assert (pair.forwards, pair.lazy.deferred) == ((51, 0), 106)


def test_the_draft_catches_up_before_it_drafts_again():
    """In one forward over all deferred tokens; its own forward follows."""
    pair = Pair(1, 2)
    for _ in range(5):
        pair.step(0)
    pair.step(3)
    assert pair.lazy.drafter.calls == [(0, 16), (3, 2)]
    assert (pair.differences(), pair.lazy.deferred) == ([], 0)


def test_replayed_slots_are_not_deferred_again():
    """A pause costs what was computed during it, not what was before."""
    pair = Pair(1, 2)
    pair.step(0)
    pair.step(3)
    pair.step(0)
    pair.step(0)
    pair.step(1)
    assert pair.lazy.drafter.calls == [(0, 8), (3, 2), (0, 8), (0, 2), (1, 2)]
    assert pair.differences() == []


def test_the_draft_catches_up_in_the_rows_of_the_batch_that_comes_next():
    """Rows move and requests leave: each token is replayed in the current row of its request."""
    pair = Pair(1, 2, 3)
    pair.step(0, [(1, 1, 0), (2, 1, 0), (3, 1, 0)])
    pair.step(0, [(3, 1, 0), (1, 1, 0), (2, 1, 0)])
    pair.do("finish", 1)
    pair.step(0, [(2, 1, 0), (3, 1, 0)])
    pair.step(1, [(3, 1, 0), (2, 1, 0)])
    assert pair.lazy.drafter.calls == [(0, 12), (1, 2)]
    assert pair.differences() == []


def test_ended_request_is_not_replayed():
    """Other requests own its blocks by then."""
    pair = Pair(1, 2)
    pair.step(0)
    pair.do("finish", 1)
    pair.do("add", 3)
    pair.step(1)
    assert pair.lazy.drafter.calls == [(0, 4), (1, 4)]
    assert (pair.differences(), pair.lazy.deferred) == ([], 0)


def test_preempted_request_is_not_replayed():
    """It is computed again, in other blocks."""
    pair = Pair(1, 2)
    pair.step(0)
    pair.step(0)
    pair.do("preempt", 1)
    pair.do("add", 3, 9)
    pair.step(1, [(3, 9, 0), (2, 1, 0), (1, 9, 0)])
    assert pair.lazy.drafter.calls == [(0, 5), (1, 15)]
    assert pair.differences() == []


def test_prefix_cache_hit_includes_deferred_slots():
    """They are replayed once for all requests that share the block."""
    pair = Pair()
    pair.do("add", 1, 9)
    pair.step(0)
    pair.do("share", 2, 1)
    pair.do("share", 3, 1)
    pair.step(2)
    assert pair.lazy.drafter.calls == [(0, 9), (2, 3)]
    assert pair.differences() == []


def test_separate_deferred_spans_are_replayed_separately():
    """Tokens between them were drafted on, and are not run again."""
    pair = Pair()
    pair.do("add", 1, 5)
    pair.step(0)
    pair.step(1)
    pair.step(0)
    pair.step(0)
    pair.step(0)
    pair.lazy.runner.appliance_deferred._is_deferred[pair.lazy.requests[1].slot(2)] = True
    pair.step(1)
    assert pair.lazy.drafter.calls[-2:] == [(0, 3), (1, 1)]
    assert pair.differences() == []


def test_request_outside_the_batch_stays_deferred():
    """It is replayed only before it drafts."""
    pair = Pair(1, 2)
    pair.step(0)
    pair.step(1, [(2, 1, 0)])
    assert {name for name, _position in pair.differences()} == {1}
    pair.step(1)
    assert pair.differences() == []


def test_replay_is_chunked_to_the_drafts_buffers():
    """They have a maximum number of tokens and of requests."""
    pair = Pair(1, 2, 3, max_num_tokens=10)
    for _ in range(20):
        pair.step(0)
    pair.do("add", 4)
    pair.step(1)
    assert pair.lazy.drafter.calls == [(0, 10)] * 6 + [(0, 9), (1, 6)]
    assert pair.differences() == []


def test_a_step_that_verifies_drafts_is_run():
    """Which of its tokens remain is known to vLLM only."""
    pair = Pair(1, 2)
    pair.step(3)
    pair.step(0, [(1, 1, 2), (2, 1, 0)])
    assert pair.lazy.drafter.calls[-1] == (0, 8)
    assert pair.lazy.deferred == 0
    pair.step(0)
    assert pair.lazy.deferred == 2
    pair.step(1)
    assert pair.differences() == []


class CountingRunner(Runner):
    """A runner that only counts how often it would have run its draft."""

    runs = 0

    def propose_draft_token_ids(self, *_arguments, **_named):
        self.runs += 1


class OtherRunner(CountingRunner):
    """One whose draft does not take the hidden states of several layers."""

    use_aux_hidden_state_outputs = False


class PictureRunner(CountingRunner):
    """One whose target reads images, which have no token ids."""

    supports_mm_inputs = True


class AsyncRunner(CountingRunner):
    """One that prepares a step before it knows the tokens of the one before."""

    use_async_scheduling = True


class HybridRunner(CountingRunner):
    """One whose layers do not share one KV cache."""

    def __init__(self, drafter, max_num_tokens):
        super().__init__(drafter, max_num_tokens)
        self.kv_cache_config.kv_cache_groups.append("sliding window")


class NGrams:
    """A draft without a model, and so without a cache."""

    def propose(self, **_named):
        """Look the continuation up."""


class Parallel(Drafter):
    """One that drafts all its tokens at once, in slots behind its input."""

    needs_extra_input_slots = True


VERIFYING = SimpleNamespace(num_spec_tokens_to_schedule=0, scheduled_spec_decode_tokens={1: [7, 7]})


@pytest.mark.parametrize(
    ("how", "odd"),
    [
        ({"runner": CountingRunner}, {"aux_hidden_states": None}),
        ({"runner": CountingRunner}, {"scheduler_output": VERIFYING}),
        ({"runner": OtherRunner}, {}),
        ({"runner": PictureRunner}, {}),
        ({"runner": AsyncRunner}, {}),
        ({"runner": HybridRunner}, {}),
        ({"runner": CountingRunner, "drafter": NGrams}, {}),
        ({"runner": CountingRunner, "drafter": Parallel}, {}),
    ],
)
def test_unknown_runner_is_left_unchanged(how, odd):
    """No hidden states of layers, drafts to verify, images, tokens not there yet, no model, slots behind."""
    engine = FakeEngine(lazy=True, **how)
    engine.add(1, 1)
    for _ in range(3):
        engine.step([(1, 1, 0)], 0, **odd)
    assert (engine.runner.runs, engine.deferred) == (3, 0)


def test_a_vllm_that_names_its_arguments_is_understood():
    """Positional and keyword arguments are equivalent."""
    engine = FakeEngine(lazy=True)
    engine.add(1)
    engine.step([(1, 9, 0)], 0)
    deferred = engine.deferred
    named = engine._arguments([Row(request=engine.requests[1], tokens=1)], 0)
    first = named.pop("scheduler_output")
    assert engine.runner.propose_draft_token_ids(first, **named).shape == (1, 0)
    assert engine.deferred == deferred
    assert engine.drafter.calls == []


class Chance:
    """Random traffic, the same for both engines."""

    def __init__(self, random: Random, max_num_tokens: int) -> None:
        self.random = random
        self.pair = Pair(max_num_tokens=max_num_tokens)
        self.names = 0
        self.k = 0

    @property
    def running(self) -> list[int]:
        return list(self.pair.lazy.requests)

    def happen(self) -> None:
        """Add and remove requests at random, and compute a batch."""
        draw = self.random
        if not self.running or (len(self.running) < 4 and draw.random() < 0.2):
            self.names += 1
            begun = [name for name in self.running if self.pair.lazy.requests[name].computed]
            if begun and draw.random() < 0.5:
                self.pair.do("share", self.names, draw.choice(begun))
            else:
                self.pair.do("add", self.names, draw.randint(1, 7))
        if draw.random() < 0.1:
            self.pair.do("finish", draw.choice(self.running))
        elif draw.random() < 0.1:
            name = draw.choice(self.running)
            if self.pair.lazy.requests[name].computed > 1:
                self.pair.do("preempt", name)
        if draw.random() < 0.2:
            self.k = draw.choice([0, 0, 0, 1, 3])
        if self.running:
            self.step(self.k)

    def step(self, k: int) -> None:
        """Compute one batch, in any order, with prompts in chunks."""
        draw, order = self.random, self.running
        draw.shuffle(order)
        self.pair.step(k, [(name, draw.randint(1, 5), draw.randint(0, 3)) for name in order])


@given(random=st.randoms(use_true_random=False), steps=st.integers(1, 40), room=st.integers(4, 24))
def test_draft_cache_equals_that_of_a_draft_run_at_every_step(random, steps, room):
    """Requests join, leave and are preempted; blocks are reused; K changes."""
    chance = Chance(random, room)
    pair = chance.pair
    for _ in range(steps):
        chance.happen()
        if not pair.lazy.deferred:
            assert pair.differences() == []
    if chance.running:
        chance.step(1)
        assert (pair.differences(), pair.lazy.deferred) == ([], 0)
    assert max(pair.lazy.drafter.caught_up, default=0) <= room
    assert pair.eager.drafter.caught_up == []
