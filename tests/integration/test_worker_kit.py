"""vLLM as others run it: their proxy routes, our plugin measures, our gateway controls, our picker picks."""

import asyncio
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import vllm

from appliance.infra.settings import DEMO_DRAFT, WorkerSettings
from appliance.serving.launch import MIDDLEWARE, draft_token_schedule
from appliance.serving.worker_protocol import OPEN_ROUTES, SPECULATION_PATH, TOKEN_FILE
from demo.process import ApplianceProcess
from tests.integration.envoy_proxy import EnvoyProxy
from tests.integration.picker_process import PickerProcess
from tests.integration.speculation_admin import QUIET, Admin, control_url, metric, wait_for
from tests.integration.worker_process import ONE_ENGINE_PROCESS, RunningWorker, stock_worker

pytestmark = pytest.mark.worker

SEQUENCES = 8
TOKEN = "a shared secret"
TARGET_ONLY, SPECULATIVE = "target_only", "speculative"
OURS = re.compile(r"appliance$|.*sovereign_appliance|__pycache__")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("kit")
    (directory / "token").write_text(TOKEN + "\n", encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def python(directory: Path) -> str:
    """A Python with vLLM and without the appliance, as in an image of vLLM."""
    venv.create(directory / "stock", symlinks=True)
    packages = next((directory / "stock").glob("lib/python*/site-packages"))
    for package in Path(vllm.__file__).parents[1].iterdir():
        if not OURS.match(package.name):
            (packages / package.name).symlink_to(package)
    python = str(directory / "stock" / "bin" / "python")
    found = subprocess.run(
        [python, "-c", "import vllm, appliance"], cwd="/", capture_output=True, check=False
    )
    assert b"No module named 'appliance'" in found.stderr
    return python


@pytest.fixture(scope="module")
def pods(directory: Path, python: str) -> Iterator[list[RunningWorker]]:
    """Two replicas of a vLLM with a draft, and with the kit that an init container copied."""
    kit = directory / "appliance-kit"
    subprocess.run([sys.executable, "-m", "appliance", "worker-kit", str(kit)], check=True)
    schedule = draft_token_schedule(WorkerSettings(max_num_seqs=SEQUENCES))
    speculation = {
        "method": "eagle3",
        "model": str(DEMO_DRAFT),
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [list(span) for span in schedule],
    }
    arguments = ["--max-num-seqs", str(SEQUENCES), "--speculative-config", json.dumps(speculation)]
    environment = {
        **ONE_ENGINE_PROCESS,
        "VLLM_PLUGINS": "appliance",
        "PYTHONPATH": str(kit),
        TOKEN_FILE: str(directory / "token"),
        OPEN_ROUTES: "1",
    }
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                stock_worker(
                    directory / f"pod-{number}.log",
                    draft=None,
                    python=python,
                    arguments=[*arguments, "--middleware", MIDDLEWARE],
                    environment=environment,
                )
            )
            for number in (1, 2)
        ]


def name_of(pod: RunningWorker) -> str:
    return pod.url.removeprefix("http://")


def get(url: str, token: str | None = None) -> tuple[int, str]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def complete(url: str) -> int:
    body = {"model": "demo-coder", "prompt": "def read_chart(", "max_tokens": 24, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            assert json.load(response)["usage"]["completion_tokens"] > 0
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def answered(pods: list[RunningWorker]) -> list[int]:
    """Requests that each pod has finished so far."""
    pages = [get(f"{pod.url}/metrics")[1] for pod in pods]
    line = re.compile(r"^vllm:request_success_total\{.*\} (\S+)$", re.MULTILINE)
    return [round(sum(map(float, line.findall(page)))) for page in pages]


def reading(pod: RunningWorker) -> dict[str, Any]:
    return json.loads(get(control_url(pod.url) + SPECULATION_PATH, TOKEN)[1])


def test_the_plugin_is_controllable_and_admits_only_our_token(pods):
    assert reading(pods[0])["controllable"] is True
    assert get(control_url(pods[0].url) + SPECULATION_PATH)[0] == 401
    assert get(control_url(pods[0].url) + SPECULATION_PATH, "another")[0] == 401


def test_a_router_of_others_needs_no_token(pods, directory):
    assert get(f"{pods[0].url}/v1/models")[0] == 200
    assert "vllm:num_requests_waiting" in get(f"{pods[0].url}/metrics")[1]
    assert complete(pods[0].url) == 200
    assert "Logging error" not in (directory / "pod-1.log").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def gateway(directory: Path, pods: list[RunningWorker]) -> Iterator[ApplianceProcess]:
    """A gateway that no request passes: it measures and controls."""
    environment = {
        **QUIET,
        "APPLIANCE_DATA__CONTROL_TOKEN_FILE": str(directory / "token"),
        "APPLIANCE_POOL__URLS": json.dumps([pod.url for pod in pods]),
    }
    with ApplianceProcess("gateway", data=directory / "gateway", environment=environment) as process:
        wait_for(
            lambda: all(metric(process, "appliance_worker_up", worker=name_of(pod)) for pod in pods),
            seconds=120,
        )
        yield process


def override(gateway: ApplianceProcess, pods: list[RunningWorker], modes: list[str]) -> None:
    """Set the modes of the pods, and wait until they are in force."""
    admin = Admin(gateway)
    for pod, mode in zip(pods, modes, strict=True):
        admin.ask(
            "speculation/override",
            "PUT",
            {"worker": name_of(pod), "mode": mode, "seconds": 600, "note": "test"},
        )
    wait_for(lambda: [reading(pod)["mode"] for pod in pods] == modes, seconds=60)


def test_the_picker_knows_the_pod_in_fallback_and_requests_go_on_when_it_dies(directory, pods, gateway):
    picker = PickerProcess(directory / "picker", [pod.url for pod in pods], token=TOKEN)

    async def through_envoy() -> None:
        await asyncio.to_thread(picker.wait_ready)
        for pod in pods:
            await picker.wait_for("appliance_picker_endpoint_up", name_of(pod), 1.0)
        proxy = EnvoyProxy([pod.url for pod in pods], picker.address, directory=directory, body_mode="NONE")
        async with proxy as envoy:
            for modes in ([SPECULATIVE, TARGET_ONLY], [TARGET_ONLY, SPECULATIVE]):
                await asyncio.to_thread(override, gateway, pods, modes)
                for pod, mode in zip(pods, modes, strict=True):
                    in_fallback = float(mode == TARGET_ONLY)
                    await picker.wait_for("appliance_picker_endpoint_in_fallback", name_of(pod), in_fallback)
                before = answered(pods)
                for _ in range(6):
                    assert await asyncio.to_thread(complete, envoy.url) == 200
                gained = [after - was for after, was in zip(answered(pods), before, strict=True)]
                # Which pod is the faster is chance on a busy machine; test_picker scripts what is measured.
                assert sum(gained) == 6
            expected = await picker.metric("appliance_picker_expected_tokens_per_second", name_of(pods[1]))
            assert expected > 0
            before = answered(pods)
            picker.stop(9)
            for _ in range(6):
                assert await asyncio.to_thread(complete, envoy.url) == 200
            gained = [after - was for after, was in zip(answered(pods), before, strict=True)]
            assert gained == [3, 3]

    try:
        asyncio.run(through_envoy())
    finally:
        picker.stop()


def test_a_gateway_beside_their_router_measures_their_traffic(pods, gateway):
    name = name_of(pods[1])
    override(gateway, pods, [SPECULATIVE, SPECULATIVE])
    busy = metric(gateway, "appliance_worker_busy_seconds_total", worker=name)
    for _ in range(3):
        assert complete(pods[1].url) == 200
    wait_for(lambda: metric(gateway, "appliance_worker_busy_seconds_total", worker=name) > busy, seconds=60)
