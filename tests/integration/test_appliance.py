"""
The whole appliance as a user gets it: `appliance up` with a real vLLM worker on the demo pair.
"""

import itertools
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from appliance.infra.settings import DEMO_DRAFT, DEMO_TARGET
from appliance.serving.devices import usable_cores
from demo.process import ApplianceProcess
from demo.training.corpus import held_out_prompts, load_corpus
from tests.abuse.gateway_under_test import GatewayUnderTest
from tests.fakes import FakeWorker
from tests.integration.caller import PROMPT, TURN, audit_entries, fetch, outcomes, sample
from tests.integration.worker_process import descendants, is_running

DEPARTURES = 3
ASKED = {"role": "user", "content": "Write a Python function `read_lines`."}
TOKENIZER = DEMO_TARGET / "tokenizer.json"

pytestmark = [pytest.mark.worker, pytest.mark.xdist_group("appliance")]


@pytest.fixture
def client(appliance) -> openai.OpenAI:
    with openai.OpenAI(base_url=appliance.url + "/v1", api_key=appliance.key, max_retries=0) as client:
        yield client


def run(appliance_or_data, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    data = getattr(appliance_or_data, "data", appliance_or_data)
    return subprocess.run(
        [sys.executable, "-m", "appliance", *arguments, "--data", str(data)],
        capture_output=True,
        text=True,
        check=check,
        timeout=120,
    )


def command_of(pid: int) -> str:
    """Command line, as vLLM may have changed it."""
    return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace").replace("\0", " ")


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def completes(client) -> bool:
    try:
        client.completions.create(model="demo-coder", prompt=PROMPT, max_tokens=4)
    except openai.APIStatusError as error:
        if error.status_code not in {502, 503}:
            raise
        return False
    return True


def wait_until(holds: Callable[[], bool], *, seconds: float, pause: float = 0.5) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(pause)


def test_lists_the_demo_model(client):
    """A client finds the model's name by asking."""
    assert [model.id for model in client.models.list()] == ["demo-coder"]
    assert client.models.retrieve("demo-coder").id == "demo-coder"


def test_streams_a_chat_to_the_unmodified_openai_client(client):
    """A streamed chat arrives in pieces, ends with a finish reason and carries no usage unasked."""
    stream = client.chat.completions.create(
        model="demo-coder",
        messages=[ASKED],
        max_tokens=48,
        temperature=0,
        stream=True,
    )
    chunks = list(stream)
    assert len("".join(chunk.choices[0].delta.content or "" for chunk in chunks)) > 20
    assert len(chunks) > 5
    assert chunks[-1].choices[0].finish_reason in {"stop", "length"}
    assert all(chunk.usage is None for chunk in chunks)


def test_streams_usage_when_the_client_asks(client):
    """The usage frame arrives on request, without the worker's own metrics."""
    stream = client.completions.create(
        model="demo-coder",
        prompt=PROMPT,
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    last = list(stream)[-1]
    assert last.usage.completion_tokens == 16
    assert not (last.model_extra or {}).get("metrics")


def test_stream_and_plain_answer_say_the_same(client):
    """Greedy text is the same streamed and whole."""
    asked = {"model": "demo-coder", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    plain = client.completions.create(**asked)
    pieces = client.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].text for chunk in pieces) == plain.choices[0].text
    assert plain.usage.completion_tokens > 0


def test_a_tokenised_prompt_and_unknown_fields_reach_the_worker(client):
    """The gateway forwards members it does not read: vLLM's own fields work."""
    answer = client.completions.create(
        model="demo-coder",
        prompt=[10, 11, 12],
        max_tokens=4,
        extra_body={"top_k": 1, "ignore_eos": True, "return_token_ids": True},
    )
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.completion_tokens == 4


@pytest.mark.parametrize(
    ("fields", "holds"),
    [
        ({"top_k": 5}, None),
        ({"top_k": 5, "top_p": 0.9}, None),
        ({"top_p": 0.5}, None),
        ({"temperature": 0, "logprobs": 2}, lambda choice: len(choice.logprobs.tokens) == 8),
        ({"n": 2}, None),
        ({"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.1}, None),
        ({"seed": 7, "stop": ["\n"]}, lambda choice: "\n" not in choice.text),
        ({"min_tokens": 4, "stop_token_ids": [9]}, None),
        ({"temperature": 0, "bad_words": ["These"]}, lambda choice: "These" not in choice.text),
        ({"echo": True}, lambda choice: choice.text.startswith(PROMPT)),
        (
            {"temperature": 0, "response_format": {"type": "json_object"}},
            lambda choice: choice.text[0] == "{",
        ),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda choice: choice.text in {"yes", "no"}),
        ({"max_tokens": 1}, lambda choice: choice.finish_reason == "length"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_drafting_worker_answers_whatever_sampling_is_asked_for(client, fields, holds):
    """And it answers the next request."""
    answer = client.completions.create(
        model="demo-coder", prompt=PROMPT, extra_body={"max_tokens": 8, **fields}
    )
    assert len(answer.choices) == fields.get("n", 1)
    assert answer.usage.completion_tokens > 0
    assert holds is None or all(map(holds, answer.choices))
    assert client.completions.create(model="demo-coder", prompt=PROMPT, max_tokens=2).usage


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 0.001}], ids=str)
def test_sampling_from_one_token_is_greedy(client, fields):
    """Draft tokens are verified with the client's sampling parameters."""
    sampled = client.completions.create(
        model="demo-coder", prompt=PROMPT, max_tokens=48, temperature=1, logprobs=1, extra_body=fields
    )
    found = sampled.choices[0].logprobs
    assert len(found.token_logprobs) == 48
    # Not compared with the text of a greedy answer: in bfloat16 two tokens may be exactly as likely.
    for chosen, likeliest in zip(found.token_logprobs, found.top_logprobs, strict=True):
        assert chosen == max(likeliest.values())


def test_a_request_the_worker_refuses_is_a_clear_400(client):
    """An error of the worker has the usual shape, with a string code or none."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="demo-coder", prompt=PROMPT, max_tokens=4, extra_body={"min_p": 0.5})
    assert "min_p" in refused.value.body["message"]
    assert set(refused.value.body) == {"message", "type", "param", "code"}
    assert refused.value.body["code"] == "needs_target_only_worker"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="demo-coder", prompt=[5] * 5000, max_tokens=4)
    assert too_long.value.body["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("change", "error", "code"),
    [
        ({"api_key": "sk-wrong"}, openai.AuthenticationError, "invalid_api_key"),
        ({"model": "gpt-9"}, openai.NotFoundError, "model_not_found"),
    ],
)
def test_wrong_key_and_unknown_model_are_refused_clearly(appliance, change, error, code):
    """The first errors of a newcomer name what is wrong."""
    key = change.pop("api_key", appliance.key)
    with (
        openai.OpenAI(base_url=appliance.url + "/v1", api_key=key, max_retries=0) as client,
        pytest.raises(error) as refused,
    ):
        client.completions.create(**{"model": "demo-coder", "prompt": "x", "max_tokens": 1, **change})
    assert refused.value.code == code


def test_code_is_accepted_and_random_hex_collapses(appliance, client):
    """The demo pair shows both ends: a draft that pays on code, and one that collapses on noise."""
    prompts = held_out_prompts(load_corpus(), count=6)
    digits = random.Random(7)
    noise = [digits.randbytes(300).hex() for _ in range(7)]

    def acceptance_length(texts: list[str]) -> float:
        """Of the middle one: now and then noise is continued by a loop, which is easy to guess."""
        before = len(outcomes(appliance.data))
        for text in texts:
            client.completions.create(
                model="demo-coder",
                prompt=text,
                max_tokens=96,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
        made = outcomes(appliance.data)[before:]
        return statistics.median(1 + entry["accepted_tokens"] / entry["drafts"] for entry in made)

    assert acceptance_length(prompts) >= 2.3
    assert acceptance_length(noise) < 1.35


def test_status_shows_the_worker_and_the_audit_head(appliance):
    """`appliance status --once` prints one table an operator can read."""
    text = run(appliance, "status", "--once", "--url", appliance.admin_url).stdout
    assert "demo-coder" in text
    assert "speculative" in text
    assert "Audit log" in text


def test_metrics_carry_acceptance_and_no_foreign_names(appliance, client):
    """What Prometheus scrapes is ours, and acceptance length is in it."""
    client.completions.create(model="demo-coder", prompt=PROMPT, max_tokens=64, temperature=0)

    def page() -> str:
        return client.with_options(timeout=10)._client.get(appliance.admin_url + "/metrics").text

    wait_until(lambda: "appliance_acceptance_length{" in page(), seconds=60)
    text = page()
    # What the worker says it batches, and the headroom.
    assert 'appliance_worker_places{worker="worker-1"} 72.0' in text
    assert "vllm:" not in text
    assert "read_lines" not in text


def test_a_receipt_proves_a_request(appliance, client, tmp_path):
    """The index in an answer's header leads to a receipt that verifies offline."""
    answer = client.completions.with_raw_response.create(model="demo-coder", prompt="x = 1\n", max_tokens=4)
    origin, _, index = answer.headers["x-appliance-audit"].rpartition("/")
    # Once the next checkpoint is signed.
    wait_until(lambda: run(appliance, "audit", "receipt", index, check=False).returncode == 0, seconds=60)
    receipt = run(appliance, "audit", "receipt", index).stdout
    assert receipt.startswith("c2sp.org/tlog-proof@v1")
    assert origin in receipt
    exported = tmp_path / "export"
    run(appliance, "audit", "export", str(exported))
    key = run(appliance, "audit", "key").stdout.strip()
    copied = tmp_path / "verify.py"
    copied.write_text((Path(__file__).parents[2] / "appliance/audit/verify.py").read_text())
    verified = subprocess.run(
        [sys.executable, "-I", str(copied), str(exported), "--key", key],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert verified.returncode == 0, verified.stdout + verified.stderr


def test_the_engine_leaves_a_core_to_the_gateway(appliance, client):
    """Otherwise, on few cores, whole seconds of answers are computed and not sent."""
    (engine,) = (pid for pid in descendants(appliance.process.pid) if "EngineCore" in command_of(pid))
    before, start = cpu_seconds(engine), time.monotonic()
    client.completions.create(
        model="demo-coder", prompt=PROMPT, max_tokens=500, extra_body={"ignore_eos": True}
    )
    # A single core is all it can have.  Threads that only receive and send take a little more.
    computing = max(1, int(usable_cores()) - 1)
    assert cpu_seconds(engine) - before < (computing + 0.3) * (time.monotonic() - start)


def test_no_process_may_leave_a_core_file(appliance):
    """It would hold prompts and keys in clear."""
    processes = [appliance.process.pid, *descendants(appliance.process.pid)]
    assert any("EngineCore" in command_of(pid) for pid in processes)
    for pid in processes:
        limits = Path(f"/proc/{pid}/limits").read_text(encoding="ascii")
        assert re.search(r"Max core file size +0 +0 ", limits), command_of(pid)


# None may be complete before its client has left, also when the disk delays the first frame for seconds.
LONG = {"max_tokens": 1900, "ignore_eos": True}
ASKED_AT_LENGTH = {"role": "user", "content": "Write a Python class with many methods."}
CUT_OFF = {
    "chat": ("/v1/chat/completions", {"messages": [TURN], "n": 2, **LONG}),
    "text": ("/v1/completions", {"prompt": [PROMPT, "import re\n"], **LONG}),
    "responses": ("/v1/responses", {"input": PROMPT, "max_output_tokens": 1900, "ignore_eos": True}),
    "messages": ("/v1/messages", {"messages": [ASKED_AT_LENGTH], "max_tokens": 1900, "temperature": 0}),
}
FRAMES = 4


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
@pytest.mark.parametrize("route", CUT_OFF)
def test_client_that_leaves_is_charged_what_the_worker_generated_for_it(appliance, route, stream):
    """
    On every route, with drafts: the log has the worker's own count, to the token, and the prompt.

    For a stream that is at least the text that the client has received.
    """
    status = json.loads(
        fetch(appliance.admin_url + "/admin/v1/status", (appliance.data / "admin.key").read_text().strip())
    )
    metrics = status["workers"][0]["url"] + "/metrics"
    token = (appliance.data / "control.token").read_text().strip()

    def counted(kind: str) -> float:
        return sample(fetch(metrics, token), f"vllm:{kind}_tokens_total")

    path, body = CUT_OFF[route]
    before, ended = (counted("prompt"), counted("generation")), len(outcomes(appliance.data))
    asked = {"model": "demo-coder", "stream": stream, **body}
    received = ""
    if stream:
        headers = {"x-api-key": appliance.key}
        with httpx.stream("POST", appliance.url + path, json=asked, headers=headers, timeout=60) as answer:
            frames = (line for line in answer.iter_lines() if line.startswith("data: "))
            received = "".join(map(text_of, itertools.islice(frames, FRAMES)))
    else:
        victim, data = GatewayUnderTest(appliance, FakeWorker()), json.dumps(asked).encode()
        with victim.connect() as connection:
            connection.sendall(victim.head(len(data), path=path) + data)
            wait_until(lambda: counted("generation") - before[1] >= FRAMES, seconds=60, pause=0.01)
    wait_until(lambda: len(outcomes(appliance.data)) > ended, seconds=60, pause=0.05)
    outcome = outcomes(appliance.data)[ended]
    assert (outcome["outcome"], outcome["route"]) == ("client_gone", path)
    assert not outcome["tokens_estimated"]
    assert outcome["completion_tokens"] >= len(Tokenizer.from_file(str(TOKENIZER)).encode(received).ids)
    wait_until(
        lambda: sample(fetch(metrics, token), "vllm:num_requests_running") == 0, seconds=60, pause=0.05
    )
    # The worker computes a prompt once for each of its answers.
    prompt = (counted("prompt") - before[0]) / body.get("n", 1)
    generated = counted("generation") - before[1]
    assert (outcome["prompt_tokens"], outcome["completion_tokens"]) == (prompt, generated)


def text_of(line: str) -> str:
    """The text in one frame of any route."""
    event = json.loads(line.removeprefix("data: "))
    if event.get("choices"):
        choice = event["choices"][0]
        return choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    delta = event.get("delta", "")
    return delta if isinstance(delta, str) else delta.get("text", "")


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
def test_the_worker_stops_within_a_second_after_a_client_has_left(appliance, stream):
    """Its own count of running requests falls to nothing, and the log says what had been made by then."""
    victim = GatewayUnderTest(appliance, FakeWorker())
    status = json.loads(
        fetch(appliance.admin_url + "/admin/v1/status", (appliance.data / "admin.key").read_text().strip())
    )
    metrics = status["workers"][0]["url"] + "/metrics"
    token = (appliance.data / "control.token").read_text().strip()

    def running() -> float:
        return sample(fetch(metrics, token), "vllm:num_requests_running")

    body = {"model": "demo-coder", "prompt": PROMPT, "max_tokens": 1900, "stream": stream, "ignore_eos": True}
    data = json.dumps(body).encode()
    before = len(outcomes(appliance.data))
    for _ in range(DEPARTURES):
        connection = victim.connect()
        connection.sendall(victim.head(len(data), path="/v1/completions") + data)
        wait_until(lambda: running() == 1, seconds=60, pause=0.01)
        if stream:
            connection.recv(65536)
            connection.recv(65536)
        left = time.monotonic()
        connection.close()
        wait_until(lambda: running() == 0, seconds=60, pause=0.01)
        assert time.monotonic() - left < 1
    ends = outcomes(appliance.data)[before:]
    assert [end["outcome"] for end in ends] == ["client_gone"] * DEPARTURES
    assert not any(end["tokens_estimated"] for end in ends)
    assert all(0 < end["completion_tokens"] < body["max_tokens"] / 2 for end in ends)


def test_a_worker_killed_mid_stream_is_an_error_event_an_outcome_and_a_restart(appliance, client):
    """
    The client gets an error, the log records it, the worker comes back, the next request works.

    Killed is its API server alone: the engine below it ends too, and keeps no memory.
    """
    stream = client.completions.create(
        model="demo-coder",
        prompt=PROMPT,
        max_tokens=1500,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    seen = iter(stream)
    for _ in range(5):
        next(seen)
    worker = descendants(appliance.process.pid)
    assert any("EngineCore" in command_of(pid) for pid in worker)
    # The guardian above it has the same words in its own command line.
    (server,) = (pid for pid in worker if re.match(r"\S+ -m \S+vllm\.server ", command_of(pid)))
    os.kill(server, signal.SIGKILL)
    with pytest.raises(openai.APIError) as failed:
        list(seen)
    assert failed.value.code == "worker_failed"
    outcome = outcomes(appliance.data)[-1]
    assert outcome["outcome"] == "worker_failed"
    assert outcome["tokens_estimated"] is True
    wait_until(lambda: not any(map(is_running, worker)), seconds=60)
    wait_until(lambda: completes(client), seconds=600)
    kinds = [entry["type"] for entry in audit_entries(appliance.data)]
    assert kinds.count("worker.started") == 2
    assert "worker.failed" in kinds


def test_the_log_verifies_while_it_is_written(appliance):
    """An operator need not stop the appliance to verify its log."""
    # A checkpoint may lie between a request's intent and its end.
    wait_until(
        lambda: (
            sample(fetch(appliance.admin_url + "/metrics"), "appliance_audit_checkpoint_lag_entries") == 0
        ),
        seconds=60,
    )
    verified = run(appliance, "audit", "verify")
    assert "valid" in verified.stdout


def test_killing_the_gateway_loses_no_acknowledged_entry(tmp_path):
    """After kill -9 every acknowledged entry is in the log, and verify names the open request."""
    data = tmp_path / "data"
    with ApplianceProcess("up", "--no-draft", data=data) as process:
        client = openai.OpenAI(base_url=process.url + "/v1", api_key=process.key, max_retries=0)
        acknowledged = []
        for _ in range(3):
            answer = client.completions.with_raw_response.create(
                model="demo-coder", prompt=PROMPT, max_tokens=4
            )
            acknowledged.append(int(answer.headers["x-appliance-audit"].rpartition("/")[2]))
        started = threading.Event()

        def interrupted() -> None:
            stream = client.completions.create(
                model="demo-coder",
                prompt=PROMPT,
                max_tokens=1900,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            try:
                for _ in stream:
                    started.set()
            except openai.OpenAIError:
                pass
            except Exception:  # noqa: BLE001 - whatever a cut socket raises
                pass

        thread = threading.Thread(target=interrupted)
        thread.start()
        assert started.wait(60)
        children = descendants(process.process.pid)
        process.process.kill()
        process.process.wait(30)
        thread.join(60)
        client.close()
    verified = run(data, "audit", "verify", check=False)
    assert verified.returncode == 4, verified.stdout
    assert "incomplete" in verified.stdout
    text = run(data, "audit", "tail", "--json", "--count", "100000").stdout
    logged = [json.loads(line) for line in text.splitlines()]
    for index in acknowledged:
        assert logged[index]["type"] == "request.intent"
        request_id = logged[index]["request_id"]
        assert any(
            entry["type"] == "request.outcome" and entry["request_id"] == request_id for entry in logged
        )
    open_request = next(
        entry["request_id"] for entry in reversed(logged) if entry["type"] == "request.intent"
    )
    assert open_request in verified.stdout
    wait_until(lambda: not any(is_running(pid) for pid in children), seconds=60)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "/nonexistent/model"], ["/nonexistent/model"]),
        (["--config", "{broken}"], ["settings file"]),
        (["--host", "192.0.2.1"], ["cannot listen"]),
    ],
)
def test_a_start_that_cannot_work_says_why_in_one_line(tmp_path, arguments, words):
    """No stack trace, nothing half started, exit code 1."""
    broken = tmp_path / "broken.yaml"
    broken.write_text("api: [")
    arguments = [argument.replace("{broken}", str(broken)) for argument in arguments]
    failed = run(tmp_path / "data", "up", *arguments, check=False)
    assert failed.returncode == 1
    lines = failed.stderr.strip().splitlines()
    assert lines[-1].startswith("appliance: ")
    assert all(word in lines[-1] for word in words)
    assert "Traceback" not in failed.stderr


def test_a_port_in_use_is_named(tmp_path):
    """The port is taken before a worker is started, so the answer comes at once."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        failed = run(tmp_path / "data", "gateway", "--port", port, "--admin-port", "0", check=False)
    assert failed.returncode == 1
    assert f"port {port}" in failed.stderr


def test_an_unwritable_data_directory_is_named(tmp_path):
    """A path that cannot be a directory is refused before anything is created."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    failed = run(blocked / "data", "gateway", check=False)
    assert failed.returncode == 1
    assert str(blocked / "data") in failed.stderr


def test_an_unknown_setting_is_named(tmp_path, monkeypatch):
    """A misspelt variable is an error, at the top level too."""
    monkeypatch.setenv("APPLIANCE_PROT", "1")
    failed = run(tmp_path / "data", "config", check=False)
    assert failed.returncode == 1
    assert "APPLIANCE_PROT" in failed.stderr


def test_a_draft_that_does_not_fit_is_refused_before_the_worker_starts(tmp_path):
    """A hidden size that disagrees with the target is found in the files, not in a crash."""
    wrong = tmp_path / "draft"
    wrong.mkdir()
    config = json.loads((DEMO_DRAFT / "config.json").read_text())
    config |= {"hidden_size": 512, "target_hidden_size": 512}
    (wrong / "config.json").write_text(json.dumps(config))
    (wrong / "model.safetensors").write_bytes((DEMO_DRAFT / "model.safetensors").read_bytes())
    failed = run(
        tmp_path / "data",
        "up",
        "--port",
        "0",
        "--admin-port",
        "0",
        "--model",
        str(DEMO_TARGET),
        "--draft",
        str(wrong),
        check=False,
    )
    assert failed.returncode == 1
    assert "512" in failed.stderr.strip().splitlines()[-1]
