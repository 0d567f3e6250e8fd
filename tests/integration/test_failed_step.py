"""An engine whose step fails: everything that is written about it, searched for what the requests said."""

import json
import re
import threading
import time

import openai
import pytest

from demo.process import ApplianceProcess

pytestmark = [pytest.mark.worker, pytest.mark.xdist_group("failed-step")]

PATIENCE_SECONDS = 300
WORKER_LOG = "data/logs/worker-worker-1.log"
FIRST, SECOND = "zephyrs over Quixhaven", "walruses under Ormbridge"
STOP, BAD_WORD, SCHEMA = "stopmark Vantibule", "badmark Okonquay", "schemamark Pellivar"
REFUSED = "refusedmark Tolverine"
MARKS = (FIRST, SECOND, STOP, BAD_WORD, SCHEMA, REFUSED)
REFUSED_REQUESTS = (
    {"structured_outputs": {"regex": f"({REFUSED}"}},
    {"structured_outputs": {"grammar": f"root ::= {REFUSED}"}},
    {"structured_outputs": {"json": {"type": REFUSED}}},
    {"logit_bias": {REFUSED: 1}},
)
SECOND_REQUEST = {
    "model": "demo-coder",
    "prompt": f"def {SECOND.replace(' ', '_')}(): # {SECOND}",
    "max_tokens": 64,
    "stop": [STOP],
    "extra_body": {
        "bad_words": [BAD_WORD],
        "structured_outputs": {"json": {"type": "object", "properties": {SCHEMA: {"type": "string"}}}},
    },
}


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """Everything that was written around the failed step: texts by file, and what the step was given."""
    directory = tmp_path_factory.mktemp("failed-step")
    scratch = directory / "scratch"
    scratch.mkdir()
    process = ApplianceProcess(
        "up",
        data=directory / "data",
        module="tests.integration.failing_appliance",
        environment={"TMPDIR": str(scratch), "APPLIANCE_LOG__FORMAT": "json"},
    )
    with process, openai.OpenAI(base_url=process.url + "/v1", api_key=process.key, max_retries=0) as client:
        for extra in REFUSED_REQUESTS:
            fail(
                client.completions.create, model="demo-coder", prompt=REFUSED, max_tokens=4, extra_body=extra
            )
        send_both(client)
        wait_until(lambda: '"state": "died"' in "".join(process.output))
    step = json.loads((scratch / "failed-step.json").read_text())
    written = {"output": "".join(process.output)}
    for path in (directory / "data").rglob("*"):
        if path.is_file():
            written[str(path.relative_to(directory))] = path.read_bytes().decode("utf-8", "replace")
    return written, step


def send_both(client):
    """The second request arrives while the first one is being drafted for; both end with the engine."""
    second = threading.Thread(target=fail, args=(client.completions.create,), kwargs=SECOND_REQUEST)
    fail(stream, client, before_fifth=second.start)
    second.join(PATIENCE_SECONDS)


def stream(client, before_fifth):
    frames = client.completions.create(
        model="demo-coder",
        prompt=f"# {FIRST}\ndef add(a, b):",
        max_tokens=1500,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for count, _ in enumerate(frames, start=1):
        if count == 5:
            before_fifth()


def fail(call, *arguments, **named):
    with pytest.raises(openai.APIError):
        call(*arguments, **named)


def wait_until(holds):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.2)


def test_no_text_of_a_request_is_written(failed):
    """Neither prompt nor stop string, bad word or schema: not in a log, not on a console, not in the data."""
    written, _ = failed
    found = [(name, mark) for name, text in written.items() for mark in MARKS if mark in text]
    assert found == []


def test_no_token_of_a_prompt_or_draft_is_written(failed):
    """Token ids are the text, for anybody who has the tokenizer."""
    written, step = failed
    assert step["drafts"], "the failed step had draft tokens"
    runs = [ids[start : start + 3] for ids in step["prompts"].values() for start in range(len(ids) - 2)]
    runs += [ids for ids in step["drafts"].values() if len(ids) > 1]
    spelt = [re.compile(r"\b" + r"\D{1,3}".join(map(str, run)) + r"\b") for run in runs]
    logs = {name: text for name, text in written.items() if name == "output" or ".log" in name}
    assert WORKER_LOG in logs
    assert [(name, each.pattern) for name, text in logs.items() for each in spelt if each.search(text)] == []


def test_an_operator_reads_where_and_in_which_requests_the_step_failed(failed):
    written, step = failed
    worker_log = written[WORKER_LOG]
    assert re.search(r"sitecustomize.py\", line \d+, in execute_model", worker_log)
    assert re.search(r"^.*\] ValueError$", worker_log, re.MULTILINE)
    dump = next(
        line for line in worker_log.splitlines() if "the failed step had 2 requests, 1 of them new" in line
    )
    assert all(request in dump for request in (*step["prompts"], *step["drafts"]))
    events = [json.loads(line) for line in written["output"].splitlines() if line.startswith("{")]
    died = next(event for event in events if event.get("state") == "died")
    assert died["detail"] == "ValueError"
