"""
The contenders: the upstream itself, this gateway with everything on, and other gateways.

Other gateways are installed from the package index into environments of their own, once, below
`.bench/`; a contender that cannot be installed is skipped with a message.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from string import Template

from benchmarks.gateway.client import Target
from benchmarks.gateway.upstream import MODEL
from demo.process import ApplianceProcess

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".bench"
LITELLM, VLLM_ROUTER = "litellm[proxy]==1.103.0", "vllm-router==0.1.17"
READY_SECONDS = 120.0
UNAUDITED = "benchmarks.audit.unaudited"
"""Module that runs our gateway without its log."""
NGINX = Template(
    """
daemon off;
worker_processes 1;
pid $scratch/nginx.pid;
events { worker_connections 8192; }
http {
    access_log off;
    client_body_temp_path $scratch;
    proxy_temp_path $scratch;
    keepalive_requests 1000000;
    upstream worker { server $worker; keepalive 1024; keepalive_requests 1000000; }
    server {
        listen 127.0.0.1:$port backlog=2048;
        location / {
            proxy_pass http://worker;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
        }
    }
}
"""
)


class NotThereError(Exception):
    """A contender that cannot be installed or started here, and why."""


@contextmanager
def appliance(
    worker: str,
    *,
    name: str = "appliance",
    checkout: Path = ROOT,
    python: Sequence[str] = (sys.executable,),
    module: str = "appliance",
) -> Iterator[Target]:
    """Our own gateway: audit log strict on SQLite, keys, limits and metrics on."""
    environment = {
        "PYTHONPATH": str(checkout.resolve()),
        "PYTHONSAFEPATH": "1",
        "APPLIANCE_POOL__URLS": json.dumps([worker]),
        "APPLIANCE_LOG__LEVEL": "warning",
        # The upstream has room for every request: none waits in the queue.
        "APPLIANCE_ADMISSION__WORKER_REQUESTS": "4096",
        # Under valgrind a commit takes seconds.
        "APPLIANCE_AUDIT__APPEND_TIMEOUT_SECONDS": "120",
    }
    with (
        tempfile.TemporaryDirectory(prefix="appliance-bench-") as scratch,
        ApplianceProcess(
            "gateway",
            data=Path(scratch),
            environment=environment,
            has_admin_listener=_mentions(checkout / "appliance" / "cli", "--admin-port"),
            python=python,
            module=module,
        ) as process,
    ):
        yield Target(name=name, url=process.url, key=process.key, pid=process.process.pid)


@contextmanager
def bare_relay(worker: str, *, python: Sequence[str] = (sys.executable,)) -> Iterator[Target]:
    """The least that Python can do: uvicorn, and a connection to the worker; no keys, no log, no limits."""
    port = free_port()
    command = [*python, "-m", "benchmarks.gateway.bare_relay", str(port), worker]
    with started(command, {"PYTHONPATH": str(ROOT)}, f"http://127.0.0.1:{port}/health") as pid:
        yield Target(name="bare Python relay", url=f"http://127.0.0.1:{port}", pid=pid)


@contextmanager
def nginx(worker: str) -> Iterator[Target]:
    """One worker process, connections to the upstream kept, nothing buffered, no log."""
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        raise NotThereError("Debian's package nginx-light is not installed")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="appliance-bench-") as scratch:
        config = Path(scratch) / "nginx.conf"
        config.write_text(
            NGINX.substitute(scratch=scratch, port=port, worker=worker.removeprefix("http://")), "utf-8"
        )
        command = [program, "-p", scratch, "-c", str(config), "-e", f"{scratch}/error.log"]
        with started(command, {}, f"http://127.0.0.1:{port}/health") as pid:
            yield Target(name="nginx", url=f"http://127.0.0.1:{port}", pid=pid)


@contextmanager
def litellm(worker: str) -> Iterator[Target]:
    """LiteLLM's proxy with one process, as its documentation starts it, without a database."""
    binaries = install("litellm", LITELLM)
    with tempfile.TemporaryDirectory(prefix="appliance-bench-") as scratch:
        config = Path(scratch) / "config.yaml"
        parameters = {"model": f"openai/{MODEL}", "api_base": f"{worker}/v1", "api_key": "sk-none"}
        # JSON is YAML.
        config.write_text(
            json.dumps({"model_list": [{"model_name": MODEL, "litellm_params": parameters}]}),
            encoding="utf-8",
        )
        port = free_port()
        command = [str(binaries / "litellm"), "--config", str(config), "--host", "127.0.0.1"]
        environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
        with started(
            [*command, "--port", str(port)], environment, f"http://127.0.0.1:{port}/health/liveliness"
        ) as pid:
            yield Target(name="LiteLLM", url=f"http://127.0.0.1:{port}", key="sk-none", pid=pid)


@contextmanager
def vllm_router(worker: str) -> Iterator[Target]:
    """The vLLM project's router, written in Rust: no keys, no log, no limits."""
    binaries = install("vllm-router", VLLM_ROUTER)
    port, metrics = free_port(), free_port()
    command = [str(binaries / "vllm-router"), "--worker-urls", worker, "--host", "127.0.0.1"]
    more = ["--port", str(port), "--policy", "round_robin", "--prometheus-port", str(metrics)]
    with started([*command, *more], {}, f"http://127.0.0.1:{port}/health") as pid:
        yield Target(name="vllm-router (Rust)", url=f"http://127.0.0.1:{port}", pid=pid)


def install(name: str, requirement: str) -> Path:
    """Make the environment of a contender unless it is there; returns its directory of programs."""
    directory = ENVIRONMENTS / name
    stamp = directory / ".installed"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != requirement:
        try:
            subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
            pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet", requirement]
            subprocess.run(pip, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError) as error:
            raise NotThereError(f"{requirement} cannot be installed: {error}") from error
        stamp.write_text(requirement, encoding="utf-8")
    return directory / "bin"


@contextmanager
def started(command: Sequence[str], environment: dict[str, str], health_url: str) -> Iterator[int]:
    """Run a server until the block ends, having waited until it answers; yields its process id."""
    with ExitStack() as stack:
        output = stack.enter_context(tempfile.TemporaryFile())
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT
        )
        stack.callback(process.wait)
        stack.callback(process.terminate)
        end = time.monotonic() + READY_SECONDS
        while not _answers(health_url):
            if process.poll() is not None or time.monotonic() > end:
                output.seek(0)
                said = output.read().decode(errors="replace").strip().rpartition("\n")[2]
                raise NotThereError(f"{command[0]} did not start: {said}")
            time.sleep(0.2)
        yield process.pid


def _mentions(directory: Path, text: str) -> bool:
    return any(text in path.read_text("utf-8") for path in directory.glob("*.py"))


def free_port() -> int:
    """A port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False
