"""The site that tests of the operator console run against: one gateway, two workers with the real plugin."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import httpx
from selenium.webdriver.common.keys import Keys

from demo.process import ApplianceProcess
from tests.controlled import EngineWorker
from tests.fakes import CONTROL_TOKEN, FakeWorker
from tests.integration.browser import Browser

PIECES = [f"word{number} " for number in range(30)]
TICK_SECONDS = 0.5
STEPS = 40


class Workers:
    """Two workers with the real plugin, in a thread of their own: one draft is good, one is useless."""

    def __init__(self, *others: FakeWorker) -> None:
        script = {"pieces": PIECES, "pause_seconds": 0.05}
        self.good, self.useless = EngineWorker(**script), EngineWorker(**script)
        self._others = others
        self.urls: list[str] = []
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_reason: object) -> None:
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(60)
        self._loop.close()

    async def _serve(self) -> None:
        async with AsyncExitStack() as stack:
            for worker in (self.good, self.useless, *self._others):
                await stack.enter_async_context(worker.serving())
                self.urls.append(worker.url)
            self._ready.set()
            number = 0
            while not self._ending.is_set():
                number += 1
                self.good.decode(STEPS, accepted=2 + (number // 6) % 2)
                self.useless.decode(STEPS, accepted=0)
                await asyncio.sleep(TICK_SECONDS)


class Site:
    """One gateway and its keys."""

    def __init__(self, process: ApplianceProcess) -> None:
        self.url, self.key = process.admin_url, process.key
        self.admin_key = (process.data / "admin.key").read_text().strip()
        self.process = process

    def page(self, path: str = "") -> str:
        return f"{self.url}/console{path}"

    def admin(self, method: str, path: str, **body: object) -> dict:
        answer = httpx.request(
            method,
            f"{self.url}/admin/v1/{path}",
            headers={"Authorization": f"Bearer {self.admin_key}"},
            json=body or None,
            timeout=60,
            trust_env=False,
        )
        assert answer.is_success, answer.text
        return answer.json()


@contextmanager
def gateway(directory: Path, workers: Workers, **console: object) -> Iterator[Site]:
    directory.mkdir(parents=True, exist_ok=True)
    token = directory / "control-token"
    token.write_text(CONTROL_TOKEN)
    token.chmod(0o600)
    control = urlsplit(workers.urls[0]).netloc
    environment = {
        "APPLIANCE_POOL__URLS": json.dumps(workers.urls),
        "APPLIANCE_DATA__CONTROL_TOKEN_FILE": str(token),
        "APPLIANCE_EGRESS__MODE": "warn",
        "APPLIANCE_EGRESS__TCP_TARGETS": '["192.0.2.1:443", "192.0.2.1:853"]',
        "APPLIANCE_EGRESS__UDP_TARGETS": "[]",
        "APPLIANCE_EGRESS__METADATA_TARGETS": "[]",
        "APPLIANCE_EGRESS__CANARY_NAME": "null",
        "APPLIANCE_EGRESS__CONTROL": control,
        "APPLIANCE_EGRESS__TIMEOUT_SECONDS": "0.5",
        **{f"APPLIANCE_CONSOLE__{name.upper()}": str(value) for name, value in console.items()},
    }
    with ApplianceProcess("gateway", data=directory / "data", environment=environment) as process:
        yield Site(process)


def log_in(browser: Browser, site: Site) -> None:
    browser.open(site.page())
    browser.find("#key").send_keys(site.admin_key, Keys.ENTER)
    browser.wait_for_path("/console")


def is_clean(browser: Browser, site: Site) -> None:
    """No request to another host, and no browser error."""
    asked = browser.requests()
    assert asked
    assert {urlsplit(url).netloc for url in asked} == {urlsplit(site.url).netloc}
    assert browser.complaints() == []
