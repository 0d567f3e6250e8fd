"""
`deploy/compose.yaml` with one of its profiles, in the tests' own engine, published to the machine outside.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests import leaks
from tests.deploy.conftest import Images
from tests.deploy.container_engine import INSIDE, ROOT, ContainerEngine

COMPOSE = ROOT / "deploy" / "compose.yaml"
START = ROOT / "deploy" / "compose" / "start.sh"
PROJECT = "appliance"
PORT = 8080
START_SECONDS = 900

ASK = f"""
import json, sys, urllib.request
path, key, body = sys.argv[1:]
request = urllib.request.Request(
    "http://{INSIDE}:{PORT}" + path, body.encode() or None,
    {{"Authorization": "Bearer " + key, "Content-Type": "application/json"}})
try:
    with urllib.request.urlopen(request, timeout=120) as answer:
        print(json.dumps([answer.status, json.load(answer)]))
except urllib.error.HTTPError as error:
    print(json.dumps([error.code, json.load(error)]))
except OSError as error:
    print(json.dumps([0, str(error)]))
"""
"""Run on the machine outside."""


@dataclass(frozen=True)
class ComposeProject:
    """One profile that is up."""

    engine: ContainerEngine
    profile: str
    environment: dict[str, str]
    """Values for the file."""
    key: str = ""
    """Key of a tenant."""
    said: str = ""
    """By the script that started it."""

    @property
    def demo_key(self) -> Path:
        return Path(self.environment["APPLIANCE_SECRETS"]) / "demo.key"

    def compose(self, *words: str, **options) -> str:
        """What compose prints."""
        command = ("docker-compose", "--file", COMPOSE, "--profile", self.profile)
        return self.engine.run(*command, *words, environment=self.environment, **options).stdout

    def ask(self, path: str, body: dict | None = None) -> tuple[int, object]:
        """Send a request from the machine outside, to the published port."""
        leaks.hear(body)
        status, answer = json.loads(
            self.engine.outside(ASK, path, self.key, json.dumps(body) if body is not None else "")
        )
        return status, answer

    def chat(self) -> str:
        """The answer to a chat from outside."""
        body = {
            "model": "demo-coder",
            "messages": [{"role": "user", "content": "def add_two_numbers(first, second"}],
            "max_tokens": 8,
        }
        status, answer = self.ask("/v1/chat/completions", body)
        assert status == 200, answer
        return answer["choices"][0]["message"]["content"]

    def name(self, service: str) -> str:
        """The container of a service."""
        return self.compose("ps", "-q", service).strip()

    def appliance(self, service: str, *words: str, check: bool = True, environment: dict | None = None):
        """Run a command of the appliance in a service's container."""
        given = [f"--env={name}={value}" for name, value in (environment or {}).items()]
        config = "--config=/etc/appliance/appliance.yaml"
        return self.engine.run(
            *("docker", "exec", *given, self.name(service), "appliance", *words, config), check=check
        )

    def wait_for(self, path: str) -> None:
        """Return once the gateway answers a path with 200 to the machine outside."""
        until = time.monotonic() + START_SECONDS
        answer: tuple[int, object] = (0, "")
        while time.monotonic() < until:
            answer = self.ask(path)
            if answer[0] == 200:
                return
            time.sleep(0.5)
        pytest.fail(f"{path}: {answer}\n{self.compose('logs', '--tail=40')}")

    def with_key(self) -> "ComposeProject":
        """The same with the key of a new tenant."""
        self.appliance("gateway", "tenant", "create", "demo")
        return replace(self, key=self.appliance("gateway", "key", "create", "demo").stdout.split()[0])


@contextmanager
def compose_project(
    images: Images, profile: str, environment: Mapping[str, str] | None = None
) -> Iterator[ComposeProject]:
    """A project to be brought up, with its own secrets; removed with its files, after a search for leaks."""
    engine = images.engine
    secrets = engine.directory / f"secrets-{profile}"
    engine.run("sh", ROOT / "deploy" / "compose" / "secrets.sh", secrets)
    given = {
        "COMPOSE_PROJECT_NAME": PROJECT,
        "APPLIANCE_SECRETS": str(secrets),
        "APPLIANCE_ADDRESS": INSIDE,
        "GATEWAY_IMAGE": images.gateway,
        "WORKER_CPU_IMAGE": images.worker,
    }
    project = ComposeProject(engine, profile, {**given, **(environment or {})})
    try:
        yield project
    finally:
        leaks.keep(profile, project.compose("logs", "--no-color", "--no-log-prefix", check=False))
        leaks.look_in(engine.directory / "data" / "volumes")
        others = ("--profile", "monitoring", "--profile", "notify")
        project.compose(*others, "down", "--volumes", "--timeout=60", seconds=300)
