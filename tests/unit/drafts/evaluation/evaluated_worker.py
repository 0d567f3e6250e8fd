"""
A stand-in for vLLM: `python evaluated_worker.py PORT SCRIPT`.

It answers completions of token ids as vLLM 0.32 does; its script sets how many draft tokens are accepted, how
long a step takes, and where its greedy answers are another model's.  It counts steps as the plugin does.  It
imports nothing of the appliance.
"""

import hashlib
import json
import os
import random
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

WORDS = 1000
TURN = 3
"""Position at which an answer may part from the target's."""
SECONDS, PLAIN_SECONDS = 2**-9, 0.75 * 2**-9
"""Of a step with drafts and of one without; sums of them are exact."""
LOCK = threading.Lock()


class State:
    """The counters of one worker."""

    def __init__(self, script: dict) -> None:
        self.script = script
        self.k = script.get("draft_tokens", 3)
        self.largest = self.k
        self.epoch = os.urandom(4).hex()
        self.cells: dict[tuple[int, int], dict] = {}
        self.asked = 0


def answer(state: State, body: dict) -> dict:
    prompt, length, script = body["prompt"], body["max_tokens"], state.script
    greedy = not body["temperature"]
    tokens: list[int] = []
    for position in range(length):
        salt = "" if greedy else f"{body['seed']} {script.get('rate')}"
        text = f"{salt} {prompt} {tokens}"
        token = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) % WORDS
        if greedy and position == TURN and script.get("parts"):
            token = (token + 1) % WORDS
        tokens.append(token)
    choice = {"index": 0, "text": "", "token_ids": tokens, "finish_reason": "length"}
    if body.get("logprobs"):
        gaps = [script.get("gap", 2.0) if place == TURN else 2.0 for place in range(length)]
        choice["logprobs"] = {
            "top_logprobs": [
                {f"token_id:{token}": -0.1, f"token_id:{(token + 1) % WORDS}": -0.1 - gap}
                for token, gap in zip(tokens, gaps, strict=True)
            ]
        }
    content = {"choices": [choice], "usage": {"completion_tokens": length}}
    if script.get("rate") is not None:
        content["metrics"] = {"speculative_decoding": draft(state, body, length)}
    return content


def draft(state: State, body: dict, length: int) -> dict:
    k, rate = state.k, state.script["rate"]
    dice = random.Random(f"{body['prompt']} {body['temperature']} {rate}")
    histogram, tokens = [0] * (state.largest + 1), 1
    steps = 0
    while k and tokens < length:
        accepted = 0
        while accepted < k and dice.random() < rate:
            accepted += 1
        histogram[accepted] += 1
        tokens += accepted + 1
        steps += 1
    steps = steps or length
    seconds = state.script.get("seconds", SECONDS) if k else PLAIN_SECONDS
    with LOCK:
        cell = state.cells.setdefault(
            (1, k), {"steps": 0, "seconds": 0.0, "seconds_squared": 0.0, "requests": 0, "tokens": 0}
        )
        for name, more in (
            ("steps", steps), ("seconds", steps * seconds), ("seconds_squared", steps * seconds**2),
            ("requests", steps), ("tokens", tokens if k else steps),
        ):  # fmt: skip
            cell[name] += more
    return {
        "acceptance_histogram": histogram,
        "num_spec_steps": sum(histogram),
        "num_draft_tokens": k * sum(histogram),
        "num_accepted_draft_tokens": sum(place * count for place, count in enumerate(histogram)),
    }


def reading(state: State) -> dict:
    return {
        "controllable": True,
        "problems": [],
        "epoch": state.epoch,
        "largest_batch": 8,
        "choices": sorted({0, state.largest}),
        "table": [[1, 8, state.k]],
        "mode": None,
        "reason": None,
        "is_probing": False,
        "batch": 0,
        "step_count": 1,
        "steps": [
            {"batch": batch, "draft_tokens": k, **cell} for (batch, k), cell in sorted(state.cells.items())
        ],
        "drafting": {
            "drafts": 0,
            "draft_tokens": 0,
            "accepted_tokens": 0,
            "drafted_per_position": [],
            "accepted_per_position": [],
        },
    }


class Handler(BaseHTTPRequestHandler):
    state: State
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self):
        self._reply(200, {} if self.path == "/health" else reading(self.state))

    def do_PUT(self):
        table = json.loads(self._body())["table"]
        assert len(table) == 1
        self.state.k = table[0][2]
        self._reply(200, reading(self.state))

    def do_POST(self):
        body = json.loads(self._body())
        with LOCK:
            self.state.asked += 1
            dies = self.state.asked == self.state.script.get("dies_at")
        if dies:
            os._exit(3)
        if "holds" in self.state.script:
            Path(self.state.script["holds"]).touch()
            threading.Event().wait()
        self._reply(200, answer(self.state, body))

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def _reply(self, status: int, content: dict) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def make_server(port: int, script: dict) -> ThreadingHTTPServer:
    own = type("OwnHandler", (Handler,), {"state": State(script)})
    server = ThreadingHTTPServer(("127.0.0.1", port), own)
    server.daemon_threads = True
    return server


def main(port: int, script: dict) -> None:
    make_server(port, script).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
