"""
What a process of a worker writes once it serves requests.

Redaction changes Python's own modules for good, so every case is a process of its own.
"""

import subprocess
import sys
import textwrap

import pytest

REQUEST = "cmpl-01M861BR5D9CA8FNXJTPB9WTWK-0-a56daa51"
MARK = "the patient's name"
START = """
import logging, sys, threading, traceback, warnings
from appliance.serving.vllm.redaction import *
logging.basicConfig(format="%(levelname)s [%(filename)s:%(lineno)d] %(message)s", level=logging.INFO)
logger, mark = logging.getLogger("vllm.anything"), "the patient's name"
redact_logs()
"""


def write(program: str, *, start: str = START) -> str:
    """What such a process writes."""
    done = subprocess.run(
        [sys.executable, "-c", start + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ('logger.error("cannot read %s at %d of %%", mark, 7)', "cannot read … at … of %"),
        ('logger.error(f"cannot read {mark}")', "ERROR [<string>:7] (text withheld"),
        ("logger.error(mark + mark)", "ERROR [<string>:7] (text withheld"),
        ("logger.error(ValueError(mark))", "ERROR [<string>:7] (text withheld"),
        ('logger.info("%(text)s", {"text": mark})', "INFO [<string>:7] …"),
        (f'logger.error("failed %s: %s", "{REQUEST}", mark)', f"failed …: … [{REQUEST}]"),
        ("warnings.warn(mark)", "<string>:7: UserWarning"),
        ("raise ValueError(mark)", "ValueError"),
        ("raise ExceptionGroup(mark, [ValueError(mark)])", "ExceptionGroup"),
        ("compile(f'({mark})', 'answer', 'eval')", "SyntaxError"),
        ("threading.Thread(target=lambda: int(mark)).start()", "Exception in a thread:"),
        ("class A:\n    __del__ = lambda self: int(mark)\na = A()\ndel a", "Exception ignored:"),
        (
            (
                "import asyncio\nasync def fail(): int(mark)\n"
                "async def main(): asyncio.create_task(fail()); await asyncio.sleep(0)\nasyncio.run(main())"
            ),
            "ValueError",
        ),
    ],
)
def test_content_is_withheld_and_its_place_stays(program, expected):
    written = write(program)
    assert MARK not in written
    assert expected in written


def test_the_servers_access_log_stops_instead_of_failing():
    written = write(
        """
        import uvicorn.logging
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(uvicorn.logging.AccessFormatter("%(client_addr)s %(request_line)s"))
        access = logging.getLogger("uvicorn.access")
        access.addHandler(handler)
        access.info('%s - "%s %s HTTP/%s" %d', "10.0.0.1:1", "GET", "/?q=" + mark, "1.1", 200)
        """
    )
    assert written == ""


def test_causes_and_notes_of_an_exception_are_withheld_too():
    written = write(
        """
        def fail():
            try:
                int(mark)
            except ValueError as error:
                error.add_note(mark)
                raise RuntimeError(mark) from error
        try:
            fail()
        except RuntimeError:
            logger.exception("failed")
            traceback.print_exc()
        """
    )
    assert MARK not in written
    assert written.count("\nValueError\n") == written.count("\nRuntimeError\n") == 2
    assert written.count('File "<string>", line 10, in fail') == 2


def test_a_process_of_multiprocessing_is_redacted_as_it_ends():
    """As vLLM's engine core does: the exception is printed by `multiprocessing`."""
    written = write(
        """
        import multiprocessing
        process = multiprocessing.get_context("fork").Process(target=lambda: int(mark))
        process.start()
        process.join()
        """
    )
    assert "Process ForkProcess-1" in written
    assert "ValueError\n" in written
    assert MARK not in written


def test_what_is_known_to_be_figures_is_written():
    """Of another process's failure, the text up to its message; throughput; the memory that was missing."""
    written = write(
        """
        class OutOfMemoryError(RuntimeError):
            __module__ = "torch"
        for error in (RuntimeError(f"Worker failed with error '{mark}'"), OutOfMemoryError("2 GiB missing")):
            try:
                raise error
            except RuntimeError:
                logger.exception("failed")
        logging.getLogger("vllm.v1.metrics.loggers").info("throughput: %.1f", 17.25)
        """
    )
    assert "\nRuntimeError: Worker failed with error\n" in written
    assert "\ntorch.OutOfMemoryError: 2 GiB missing\n" in written
    assert "throughput: 17.2" in written
    assert MARK not in written


def test_before_the_first_request_the_causes_of_a_failed_start_are_complete():
    program = """
        class Engine:
            def add(self):
                raise ValueError("quoted")
        redact_before(Engine, "add")
        logger.error("no %s", "model")
        for _ in range(2):
            try:
                Engine().add()
            except ValueError:
                logger.exception("no %s", "model")
        redact_before(Engine, "gone")
        """
    written = write(program, start=START.replace("\nredact_logs()", ""))
    assert "no model" in written
    assert written.count("no …") == 2
    assert "quoted" not in written.replace('raise ValueError("quoted")', "")


def test_an_engine_of_another_structure_is_redacted_at_once():
    """Where the first request cannot be noticed."""
    start = START.replace("\nredact_logs()", '\nredact_before(object, "gone")')
    assert MARK not in write("raise ValueError(mark)", start=start)


def test_a_failed_step_is_described_by_counts():
    """Which requests it had and how many tokens; neither ids of tokens nor parameters."""
    written = write(
        f"""
        from types import SimpleNamespace
        core = SimpleNamespace(dump_engine_exception=None)
        replace_failure_dump(core)
        logging.getLogger().handlers[0].setStream(sys.stdout)
        output = SimpleNamespace(
            num_scheduled_tokens={{"{REQUEST}": 9}},
            scheduled_new_reqs=[mark],
            scheduled_spec_decode_tokens={{"{REQUEST}": [40312, 40313]}},
        )
        core.dump_engine_exception(None, output, None)
        core.dump_engine_exception(None, mark, mark)
        """
    )
    expected = "the failed step had 1 requests, 1 of them new, and 9 tokens, 2 of them draft tokens"
    assert f"{expected}: {REQUEST} (9)\n" in written
    assert "4031" not in written
    assert MARK not in written


@pytest.mark.parametrize("guarded", [True, False])
def test_a_step_that_fails_as_it_is_started_is_described_once(guarded):
    """An executor in the engine's process raises before vLLM guards the result."""
    written = write(
        f"""
        from types import SimpleNamespace
        class EngineCore:
            scheduler = SimpleNamespace(make_stats=lambda: None)
            def step(self):
                scheduler_output = SimpleNamespace(
                    num_scheduled_tokens={{"{REQUEST}": 9}},
                    scheduled_new_reqs=[],
                    scheduled_spec_decode_tokens={{}},
                )
                try:
                    int(mark)
                except ValueError:
                    if {guarded}:
                        core.dump_engine_exception(None, scheduler_output, None)
                    raise
        core = SimpleNamespace(dump_engine_exception=None, EngineCore=EngineCore)
        replace_failure_dump(core)
        logging.getLogger().handlers[0].setStream(sys.stdout)
        EngineCore().step()
        """
    )
    assert (
        written.count(
            f"the failed step had 1 requests, 0 of them new, and 9 tokens, 0 of them draft tokens: {REQUEST}"
        )
        == 1
    )
    assert "ValueError" in written
    assert MARK not in written
