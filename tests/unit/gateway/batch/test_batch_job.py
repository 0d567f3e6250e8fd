"""A batch from its input to its end: every line is answered once, whatever happens in between."""

import asyncio
import json
from dataclasses import replace

import pytest

from appliance.errors import AuditUnavailableError, BatchConflictError, StorageUnavailableError
from appliance.gateway.batch.batch import Status
from appliance.gateway.batch.job import BatchJob
from appliance.gateway.batch.journal import ResultJournal
from appliance.tenancy import ContentPolicy
from tests.fakes import until
from tests.unit.gateway.batch.scene import Scene, requests

IDS = [f"line-{number}" for number in range(40)]


@pytest.fixture(params=[ContentPolicy.NONE, ContentPolicy.ENCRYPTED], ids=["plain", "encrypted"])
def scene(request, tmp_path):
    made = Scene(tmp_path, content=request.param)
    yield made
    made.store.close()


async def run(scene, batch):
    """Run a batch from its current state; return its row."""
    await BatchJob(scene.row(batch), scene.parts).run()
    return scene.row(batch)


async def test_every_line_is_in_the_outputs(scene):
    """OpenAI's shapes, counts and states; no journal is left."""
    scene.answers.statuses = {"line-3": [400]}
    batch = await scene.begin(requests(*IDS))
    ended = await run(scene, batch)
    assert ended.status is Status.COMPLETED
    assert (ended.counts.total, ended.counts.completed, ended.counts.failed) == (40, 39, 1)
    assert ended.model == "demo"
    assert {Status.IN_PROGRESS, Status.FINALIZING, Status.COMPLETED} == set(ended.moments)
    outputs = await scene.lines("acme", ended.output_file_id)
    assert {line["custom_id"]: line["response"]["body"]["said"] for line in outputs} == {
        each: each for each in IDS if each != "line-3"
    }
    (error,) = await scene.lines("acme", ended.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"], error["error"]) == ("line-3", 400, None)
    assert scene.on_disk() == {batch.input_file_id, ended.output_file_id, ended.error_file_id}
    assert (scene.counted["completed"], scene.counted["failed"]) == (39, 1)


async def test_audit_log_records_files_batch_and_end(scene):
    """Files, batch and its end, linked by their ids; never their content."""
    batch = await scene.begin(requests("a"))
    ended = await run(scene, batch)
    kinds = [entry["type"] for entry in scene.sink.entries]
    assert kinds == ["file.created", "batch.created", "file.created", "batch.ended"]
    assert scene.sink.entries[1]["file"] == scene.sink.entries[0]["file"] == batch.input_file_id
    assert scene.sink.entries[2]["batch"] == batch.batch_id
    end = scene.sink.entries[3]
    assert (end["outcome"], end["requests"], end["completed"], end["failed"]) == ("completed", 1, 1, 0)
    assert end["output_file"] == ended.output_file_id
    assert "error_file" not in end
    assert "secret" not in json.dumps(scene.sink.entries)


async def test_content_on_disk_follows_the_tenants_policy(scene):
    """All of it is encrypted for a tenant whose policy says so; the keys are in another directory."""
    encrypted = scene.caller().tenant.content is ContentPolicy.ENCRYPTED
    scene.gate.room, scene.answers.allowed = 1, 1
    batch = await scene.begin(requests("a", "b"))
    job = asyncio.ensure_future(run(scene, batch))
    await until(lambda: scene.answers.asked["b"])
    written = [path.read_bytes() for path in (scene.directory / "files" / "one").iterdir()]
    assert any(b"unmistakable" in content for content in written) is not encrypted
    job.cancel()
    await asyncio.gather(job, return_exceptions=True)
    scene.answers.allowed = None
    ended = await run(scene, batch)
    assert bool(scene.keys.names()) is encrypted
    assert (await scene.files.get("acme", ended.output_file_id)).sealed is encrypted


async def test_after_a_crash_no_line_is_in_the_outputs_twice_or_missing(scene):
    """Stopped at any moment, again and again, and resumed from the disk each time."""
    scene.answers.statuses = {each: [500] for each in IDS[::7]}
    batch = await scene.begin(requests(*IDS))
    starts = 0
    while scene.row(batch).status is not Status.COMPLETED:
        job = asyncio.ensure_future(run(scene, batch))
        scene.answers.allowed = starts % 6
        await until(lambda job=job: job.done() or scene.answers.allowed == 0)
        await asyncio.sleep(0.002 * (starts % 5))
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        scene.build()
        starts += 1
        assert starts < 500
    ended = scene.row(batch)
    outputs = await scene.lines("acme", ended.output_file_id)
    assert sorted(line["custom_id"] for line in outputs) == sorted(IDS)
    assert starts > len(IDS) / 6
    assert set(scene.answers.left) <= {False}
    assert scene.on_disk() == {batch.input_file_id, ended.output_file_id}


@pytest.mark.parametrize("step", ["write_outputs", "announce", "move", "remove"])
async def test_crash_while_finalizing_changes_no_result(scene, monkeypatch, step):
    """Outputs without a row are written again, from the same journal."""
    batch = await scene.begin(requests(*IDS))

    def die(*_args, **_more):
        raise StorageUnavailableError("the process died here")

    with monkeypatch.context() as patch:
        if step == "write_outputs":
            patch.setattr("appliance.gateway.batch.job.write_outputs", die)
        elif step == "announce":
            scene.answers.held.clear()
        elif step == "move":
            move = scene.store.move
            patch.setattr(
                scene.store,
                "move",
                lambda which, status, now, **more: (
                    die() if status is Status.COMPLETED else move(which, status, now, **more)
                ),
            )
        else:
            patch.setattr(scene.vault, "remove", die)
        job = asyncio.ensure_future(run(scene, batch))
        if step == "announce":
            await until(lambda: scene.answers.asked)
            scene.sink.refusal = AuditUnavailableError("the disk is full")
            scene.answers.held.set()
        with pytest.raises((StorageUnavailableError, AuditUnavailableError)):
            await job
    scene.sink.refusal = None
    scene.build()
    if step != "remove":
        assert scene.row(batch).status is Status.FINALIZING
        await run(scene, batch)
    ended = scene.row(batch)
    assert ended.status is Status.COMPLETED
    outputs = await scene.lines("acme", ended.output_file_id)
    assert sorted(line["custom_id"] for line in outputs) == sorted(IDS)
    assert set(scene.answers.asked.values()) == {1}
    assert scene.on_disk() == {batch.input_file_id, ended.output_file_id}


async def test_invalid_input_fails_before_any_line_runs(scene):
    batch = await scene.begin(requests("a", "a") + b"nonsense\n")
    ended = await run(scene, batch)
    assert ended.status is Status.FAILED
    assert [(problem.line, problem.code) for problem in ended.errors] == [
        (2, "duplicate_custom_id"),
        (3, "invalid_json_line"),
    ]
    assert not scene.answers.asked
    assert scene.sink.of("batch.ended")[0]["outcome"] == "failed"
    assert scene.on_disk() == {batch.input_file_id}


async def test_too_long_line_is_reported(scene):
    batch = await scene.begin(requests("a") + b"x" * 100_001)
    ended = await run(scene, batch)
    assert [(problem.line, problem.code) for problem in ended.errors] == [(2, "line_too_long")]


async def test_cancelled_batch_returns_finished_results(scene):
    """Lines in flight are aborted as if the client had left; the error file has the rest."""
    scene.gate.room, scene.answers.allowed = 2, 6
    batch = await scene.begin(requests(*IDS))
    job = BatchJob(scene.row(batch), scene.parts)
    running = asyncio.ensure_future(job.run())
    await until(lambda: (scene.answers.allowed, scene.answers.at_once) == (0, 2))
    cancelling = await scene.batches.cancel("acme", batch.batch_id)
    assert cancelling.status is Status.CANCELLING
    job.apply_row(scene.row(batch), has_input=True)
    await running
    ended = scene.row(batch)
    assert ended.status is Status.CANCELLED
    assert scene.answers.left == [True, True]
    done = [line["custom_id"] for line in await scene.lines("acme", ended.output_file_id)]
    rest = await scene.lines("acme", ended.error_file_id)
    assert sorted(done + [line["custom_id"] for line in rest]) == sorted(IDS)
    assert {line["error"]["code"] for line in rest} == {"batch_cancelled"}
    assert (ended.counts.completed, ended.counts.failed) == (len(done), len(rest))
    with pytest.raises(BatchConflictError):
        await scene.batches.cancel("acme", batch.batch_id)


async def test_batch_cancelled_during_validation_has_no_outputs(scene):
    batch = await scene.begin(requests(*IDS))
    await scene.batches.cancel("acme", batch.batch_id)
    ended = await run(scene, batch)
    assert (ended.status, ended.output_file_id, ended.error_file_id) == (Status.CANCELLED, None, None)
    assert not scene.answers.asked


async def test_expired_batch_returns_finished_results(scene):
    scene.answers.held.clear()
    batch = await scene.begin(requests(*IDS), window_seconds=3600)
    running = asyncio.ensure_future(run(scene, batch))
    await until(lambda: scene.answers.at_once)
    scene.clock.now += 3601
    ended = await running
    assert ended.status is Status.EXPIRED
    assert ended.output_file_id is None
    rest = await scene.lines("acme", ended.error_file_id)
    assert [line["custom_id"] for line in rest] == IDS
    assert {line["error"]["code"] for line in rest} == {"batch_expired"}


async def test_revoking_its_key_stops_a_batch(scene):
    """No line runs under a revoked key; the finished results stay the tenant's."""
    scene.gate.room = 1
    batch = await scene.begin(requests(*IDS))
    running = asyncio.ensure_future(run(scene, batch))
    await until(lambda: scene.answers.asked["line-5"])
    scene.answers.held.clear()
    await until(lambda: scene.answers.at_once)
    await asyncio.sleep(0.05)
    asked = sum(scene.answers.asked.values())
    acme, other = scene.tenants.tenants
    scene.tenants.replace((replace(acme, keys=()), other))
    ended = await running
    assert sum(scene.answers.asked.values()) == asked
    assert ended.status is Status.FAILED
    assert [problem.code for problem in ended.errors] == ["invalid_api_key"]
    assert len(await scene.lines("acme", ended.output_file_id)) >= 5


async def test_erasing_its_input_ends_a_batch_without_outputs(scene):
    scene.answers.held.clear()
    batch = await scene.begin(requests(*IDS))
    job = BatchJob(scene.row(batch), scene.parts)
    running = asyncio.ensure_future(job.run())
    await until(lambda: scene.answers.at_once)
    assert await scene.files.erase("acme", int((scene.clock() + 1) * 1000)) == 1
    job.apply_row(scene.row(batch), has_input=False)
    await running
    ended = scene.row(batch)
    assert (ended.status, ended.output_file_id) == (Status.FAILED, None)
    assert [problem.code for problem in ended.errors] == ["content_erased"]
    assert scene.on_disk() == set()
    assert scene.keys.names() == []
    assert [entry["reason"] for entry in scene.sink.of("file.deleted")] == ["erased"]


async def test_content_erased_while_its_batch_ends_leaves_no_outputs(scene, monkeypatch):
    """They are written, but get no row; the next try finds nothing to do."""
    batch = await scene.begin(requests("a"))
    record_end = BatchJob._record_end

    async def erase_first(job, *more):
        await scene.files.erase("acme", int((scene.clock() + 1) * 1000))
        await record_end(job, *more)

    with monkeypatch.context() as patch:
        patch.setattr(BatchJob, "_record_end", erase_first)
        assert (await run(scene, batch)).status is Status.FINALIZING
    ended = await run(scene, batch)
    assert (ended.status, ended.output_file_id) == (Status.FAILED, None)
    assert scene.on_disk() == set()


async def test_after_a_temporary_refusal_one_line_is_tried_first(scene):
    """Not every line meets the limit: each refusal is an entry in the log."""
    scene.answers.statuses = {each: [429, 503, 429] for each in IDS}
    batch = await scene.begin(requests(*IDS))
    running = asyncio.ensure_future(run(scene, batch))
    await until(lambda: sum(scene.answers.asked.values()) == 4)
    await asyncio.sleep(0.3)
    assert sum(scene.answers.asked.values()) == 4
    for _ in range(3):
        before = sum(scene.answers.asked.values())
        scene.clock.now += 61
        await until(lambda before=before: sum(scene.answers.asked.values()) == before + 1)
        await asyncio.sleep(0.15)
        assert sum(scene.answers.asked.values()) == before + 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_concurrency_adapts_to_the_tenants_limit(scene):
    """Otherwise every answered line would have several others refused, each an entry in the log."""
    scene.answers.limit, scene.gate.room = 2, 16
    batch = await scene.begin(requests(*(f"line-{number}" for number in range(200))))
    running = asyncio.ensure_future(run(scene, batch))
    began = scene.clock.now
    while not running.done():
        scene.clock.now += 0.1
        await asyncio.sleep(0.002)
    assert (await running).counts.completed == 200
    assert scene.answers.refused < 100
    # One second for each refusal, never the minute that refusals in a row take.
    assert scene.clock.now - began < 300


async def test_line_that_fails_repeatedly_is_given_up(scene):
    scene.answers.statuses = {"b": [502, 502, 502, 502]}
    ended = await run(scene, await scene.begin(requests("a", "b", "c")))
    assert ended.status is Status.COMPLETED
    assert dict(scene.answers.asked) == {"a": 1, "b": 3, "c": 1}
    (error,) = await scene.lines("acme", ended.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"]) == ("b", 502)


async def test_results_that_cannot_be_stored_are_requested_again(scene, monkeypatch):
    """A full disk stops the batch; only durable results count."""
    batch = await scene.begin(requests(*IDS))
    with monkeypatch.context() as patch:

        def full(*_args):
            raise StorageUnavailableError("results could not be kept: No space left on device")

        patch.setattr(ResultJournal, "add", full)
        with pytest.raises(StorageUnavailableError):
            await run(scene, batch)
    assert scene.counted["completed"] == 0
    ended = await run(scene, batch)
    assert sorted(line["custom_id"] for line in await scene.lines("acme", ended.output_file_id)) == sorted(
        IDS
    )


async def test_lines_in_flight_are_bounded_by_capacity(scene):
    scene.gate.room = 3
    await run(scene, await scene.begin(requests(*IDS)))
    assert scene.answers.most_at_once == 3
