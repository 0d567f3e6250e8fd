"""
A small site: two workers and a gateway in processes of their own, with one draft registry between them.
"""

import json
import os
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.audit.signing_keys import create_signing_key
from appliance.serving.supervise import free_port
from demo.process import ApplianceProcess

HOST = "127.0.0.1"
TENANT = "ward"
WORKERS = 2
START_SECONDS = 600.0
POLL_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What the workers are started with."""

    target: Path
    draft: Path


class Site:
    """A running gateway with its workers, as an operator sees it; made by `open_site`."""

    def __init__(self, gateway: ApplianceProcess, environment: Mapping[str, str], key: str) -> None:
        self.gateway = gateway
        """Its key is that of a tenant of which nothing is kept."""
        self.key = key
        self._environment = environment

    def command(self, *arguments: str) -> str:
        """
        Run `appliance ...` as the operator does, and return what it printed.

        Raises:
            CommandError: it ended with another code than 0.
        """
        return run(("appliance", *arguments), self.gateway.data, self._environment)

    def chat(self, ask: str, *, tokens: int, harvested: bool) -> dict[str, Any]:
        """Ask one thing, greedy, as the ward or as a tenant that is never harvested; the whole answer."""
        body = {
            "model": "demo-coder",
            "messages": [{"role": "user", "content": ask}],
            "max_tokens": tokens,
            "temperature": 0.0,
            "seed": 7,
        }
        key = self.key if harvested else self.gateway.key
        request = urllib.request.Request(
            self.gateway.url + "/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            answer: dict[str, Any] = json.load(response)
        return answer


class CommandError(Exception):
    """A command failed; carries what it printed."""


def run(command: tuple[str, ...], data: Path, environment: Mapping[str, str]) -> str:
    """Run one command of ours on a data directory; raises CommandError."""
    finished = subprocess.run(
        [sys.executable, "-m", *command, "--data", str(data)],
        capture_output=True,
        text=True,
        check=False,
        # Wide enough that no cell of a table is broken.
        env={**os.environ, "COLUMNS": "200", **environment},
    )
    if finished.returncode:
        message = f"`{' '.join(command)}` ended with {finished.returncode}: {finished.stderr[-2000:]}"
        raise CommandError(message)
    return finished.stdout


@contextmanager
def open_site(pair: Pair, directory: Path, *, settings: Mapping[str, str]) -> Iterator[Site]:
    """
    Start two workers and a gateway on a pair, with a tenant whose content may train drafts.

    Args:
        pair: target and draft.
        directory: where their data directories and the registry are made.
        settings: `APPLIANCE_...` variables for all of them.
    """
    token = directory / "control.token"
    directory.mkdir(parents=True, exist_ok=True)
    if not token.exists():
        token.write_text(secrets.token_hex(32) + "\n", encoding="utf-8")
        token.chmod(0o600)
    key_of_drafts = directory / "drafts.key"
    if not key_of_drafts.exists():
        create_signing_key(key_of_drafts)
    port, admin_port, *ports = [free_port(HOST) for _ in range(2 + WORKERS)]
    common = {
        "APPLIANCE_DATA__CONTROL_TOKEN_FILE": str(token),
        "APPLIANCE_DRAFTS__DIRECTORY": str(directory / "drafts"),
        "APPLIANCE_DRAFTS__SIGNING_KEY_FILE": str(key_of_drafts),
        "APPLIANCE_WORKER__MODEL": str(pair.target),
        "APPLIANCE_WORKER__DRAFT": str(pair.draft),
        "APPLIANCE_LOG__LEVEL": "warning",
        **settings,
    }
    urls = json.dumps([f"http://{HOST}:{port}" for port in ports])
    gateway_only = {
        **common,
        "APPLIANCE_POOL__URLS": urls,
        "APPLIANCE_API__PORT": str(port),
        "APPLIANCE_API__ADMIN_PORT": str(admin_port),
    }
    with ExitStack() as stack:
        for number, own in enumerate(ports, start=1):
            stack.enter_context(_worker(directory / f"worker-{number}", own, common))
        where = ("--port", str(port), "--admin-port", str(admin_port))
        gateway = stack.enter_context(
            ApplianceProcess("gateway", *where, data=directory / "gateway", environment=gateway_only)
        )
        data = gateway.data
        if TENANT not in run(("appliance", "tenant", "list"), data, gateway_only):
            allowed = ("--content", "encrypted", "--may", "train_drafts")
            run(("appliance", "tenant", "create", TENANT, *allowed), data, gateway_only)
        key = run(("appliance", "key", "create", TENANT), data, gateway_only).strip()
        site = Site(gateway, gateway_only, key)
        _wait_for_workers(site)
        yield site


def _wait_for_workers(site: Site) -> None:
    """Return once both take requests."""
    deadline = time.monotonic() + START_SECONDS
    while site.command("workers", "list").count("takes requests") < WORKERS:
        if time.monotonic() > deadline:
            message = f"the workers did not become healthy within {START_SECONDS:.0f} s"
            raise CommandError(message)
        time.sleep(POLL_SECONDS)


@contextmanager
def _worker(data: Path, port: int, environment: Mapping[str, str]) -> Iterator[None]:
    """One `appliance worker`, until the block ends; the gateway waits until it is healthy."""
    log = data.with_suffix(".log")
    with log.open("a", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "appliance", "worker", "--data", str(data), "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(120)
