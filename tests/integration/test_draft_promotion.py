"""
Drafts promoted and rolled back on two real vLLM workers of one gateway, under traffic.

All tests share the two workers, as each restart takes half a minute.  Every test begins and ends with the
committed draft on both.
"""

import json
import shutil
import time
import urllib.error
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from appliance.audit.signing_keys import create_signing_key
from appliance.drafts.evaluation.evaluation_results import Evaluation, EvaluationVerdict
from appliance.drafts.evaluation.store import save_evaluation
from appliance.drafts.promotion.promotion import short
from appliance.drafts.registry.active_draft import ActiveDraft, read_active_draft
from appliance.drafts.registry.draft_source import read_source
from appliance.drafts.registry.site_registry import open_registry, site_signer
from appliance.infra.settings import DEMO_DRAFT, DEMO_TARGET, DataSettings, DraftSettings, Settings
from appliance.serving.weights import digest_weights
from demo.process import ApplianceProcess
from tests.integration.browser import Browser
from tests.integration.caller import audit_entries
from tests.integration.console_site import Site, log_in
from tests.integration.speculation_admin import QUIET, Admin, verify_log, wait_for
from tests.integration.speculation_traffic import Traffic, code
from tests.integration.worker_process import WorkerProcess

pytestmark = pytest.mark.worker

RESTARTS = 800.0
"""Seconds that a few restarts and a trial may take on a small machine that runs other programs as well."""
OLD = digest_weights(DEMO_DRAFT)


@dataclass
class DraftSite:
    """The drafts directory that two workers and the gateway share, and the gateway."""

    directory: Path
    environment: dict[str, str]
    process: ApplianceProcess | None = None
    key: str = ""

    @property
    def settings(self) -> Settings:
        """The gateway's draft settings."""
        drafts = DraftSettings(
            directory=self.directory / "drafts", signing_key_file=self.directory / "drafts.key"
        )
        return Settings(data=DataSettings(directory=self.directory / "data"), drafts=drafts)

    @property
    def target(self) -> str:
        return digest_weights(DEMO_TARGET)

    @property
    def active(self) -> ActiveDraft:
        return read_active_draft(self.directory / "drafts", self.target)

    def gateway(self) -> ApplianceProcess:
        """The running gateway; a new one continues where the last one ended."""
        if self.process is None:
            self.process = ApplianceProcess(
                "gateway", data=self.directory / "data", key=self.key, environment=self.environment
            )
            self.process.wait_ready()
            self.key = self.process.key
        return self.process

    def kill(self) -> None:
        assert self.process is not None
        self.process.process.kill()
        self.close()

    def close(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.__exit__()

    def traffic(self) -> Any:
        """Two clients that ask for code; they leave the cores to workers that start."""
        return Traffic(self.gateway(), clients=2, prompt=code(), pause_seconds=2.0).running()

    def entries(self, prefix: str = "draft.") -> list[dict[str, Any]]:
        return [entry for entry in audit_entries(self.directory / "data") if entry["type"].startswith(prefix)]

    def register(self, name: str, *, damaged: bool) -> str:
        """Register a copy of the demo draft under another digest, intact or with its weights damaged."""
        copy = self.directory / name
        shutil.copytree(DEMO_DRAFT, copy)
        record = json.loads((copy / "training.json").read_text(encoding="utf-8"))
        record["recipe"] = {"name": name}
        (copy / "training.json").write_text(json.dumps(record), encoding="utf-8")
        if damaged:
            file = next(copy.glob("*.safetensors"))
            tensors = load_file(file)
            for tensor_name, tensor in tensors.items():
                if tensor.ndim == 2:
                    tensors[tensor_name] = tensor.flip(0).contiguous()
            save_file(tensors, file)
        registry = open_registry(self.settings, time.time)  # noqa: TID251 - this is a root too
        signer = site_signer(self.settings)
        return registry.register(read_source(copy), target=self.target, how="imported", signer=signer).digest

    def evaluated(self, draft: str) -> None:
        """Save a passed evaluation; `test_draft_evaluation` makes real ones."""
        evaluation = Evaluation(
            draft=draft,
            incumbent=OLD,
            target=self.target,
            dataset=f"sha256:{'d' * 64}",
            verdict=EvaluationVerdict.PASSED,
            reasons=(),
            made="2026-11-22T10:00:00Z",
            engine="vllm 0.32.0",
            device="cpu",
            dtype="float32",
            draft_tokens=3,
            max_tokens=64,
            margin=0.02,
            epsilon=1e-3,
            prompts=32,
            compared=32,
            missing=0,
            unusable=0,
            complete=True,
        )
        save_evaluation(self.directory / "drafts", evaluation, "<p>")


@pytest.fixture(scope="module")
def good(site: DraftSite) -> str:
    """A draft equal to the committed one, with a passed evaluation; the tests promote it in turn."""
    draft = site.register("as-good", damaged=False)
    site.evaluated(draft)
    return draft


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[DraftSite]:
    directory = tmp_path_factory.mktemp("promotion")
    (directory / "token").write_text("a shared secret\n", encoding="utf-8")
    create_signing_key(directory / "drafts.key")
    shared = {
        **QUIET,
        "APPLIANCE_DATA__CONTROL_TOKEN_FILE": str(directory / "token"),
        "APPLIANCE_DRAFTS__DIRECTORY": str(directory / "drafts"),
        "APPLIANCE_DRAFTS__SIGNING_KEY_FILE": str(directory / "drafts.key"),
    }
    with ExitStack() as stack:
        starting = [WorkerProcess(directory / name, environment=shared) for name in ("first", "second")]
        for worker in starting:
            stack.callback(worker.stop)
        for worker in starting:
            worker.wait_healthy()
        gateway = {
            **shared,
            "APPLIANCE_POOL__URLS": json.dumps([worker.url for worker in starting]),
            # Two workers share two cores here: their speeds differ by more than any two drafts'.
            "APPLIANCE_DRAFTS__TRIAL_DRAFTS": "64",
            "APPLIANCE_DRAFTS__TRIAL_MARGIN": "0.45",
            "APPLIANCE_DRAFTS__TRIAL_SECONDS": "600",
            "APPLIANCE_MONITOR__LEASE_SECONDS": "5",
            # A worker that waits for a core is slow to be scraped, not down.
            "APPLIANCE_MONITOR__SCRAPE_TIMEOUT_SECONDS": "10",
        }
        site = DraftSite(directory=directory, environment=gateway)
        yield site
        site.close()
    assert verify_log(directory / "data") == 0


@pytest.fixture
def admin(site: DraftSite) -> Admin:
    """The admin API of a gateway that controls both workers, each with the committed draft."""
    admin = Admin(site.gateway())
    wait_for(lambda: admin.ask("drafts")["acting"] and len(drafts(admin)) == 2, seconds=RESTARTS)
    assert drafts(admin) == [OLD, OLD]
    return admin


def drafts(admin: Admin) -> list[str]:
    """The drafts that workers report; none for a worker that is down."""
    return [worker["draft"] for worker in admin.ask("drafts")["workers"] if worker["takes_requests"]]


def newest(admin: Admin) -> dict[str, Any]:
    return admin.ask("drafts")["promotions"][0]


def ended(admin: Admin) -> dict[str, Any]:
    """Wait until the newest promotion or rollback is over."""

    def over() -> dict[str, Any] | None:
        promotion = newest(admin)
        return promotion if promotion["over"] else None

    return wait_for(over, seconds=RESTARTS)


class RefusedError(Exception):
    """The gateway refused a request: status and message."""


def order(admin: Admin, path: str, **body: Any) -> dict[str, Any]:
    """Post a request, and retry while a gateway that just started asks for a moment."""

    def taken() -> dict[str, Any] | None:
        try:
            return admin.ask(path, "POST", body)
        except urllib.error.HTTPError as error:
            with error:
                message = json.load(error)["error"]["message"]
            if "try again in a moment" in message:
                return None
            raise RefusedError(error.code, message) from None

    return wait_for(taken, seconds=RESTARTS)


@dataclass(frozen=True)
class ModelsPage:
    """The console's page of models, of an operator who may act."""

    site: DraftSite
    window: Browser

    def promote(self, draft: str, **fields: str) -> None:
        part = f"[aria-label='Draft {short(draft)}']"
        self.confirm(part, f"Promote {short(draft)}", "has begun", **fields)

    def confirm(self, part: str, button: str, says: str, **fields: str) -> None:
        """Log in, open what this part of the page asks, fill it in, press the button, read what it says."""
        page, console = self.window, Site(self.site.gateway())
        page.forget()
        log_in(page, console)
        page.open(console.page("/models"))
        page.find(f"{part} details.confirm > summary").click()
        for name, text in fields.items():
            page.find(f"details[open] [name={name}]").send_keys(text)
        page.click_words("button.danger", button)
        page.wait_for(says, "[data-notice]")


@pytest.fixture
def models_page(site: DraftSite, window: Browser) -> ModelsPage:
    return ModelsPage(site, window)


def test_damaged_draft_is_refused_and_rolled_back(site, admin, models_page):
    """Promoted without an evaluation, in the console; only the canary worker ever gets it."""
    bad = site.register("damaged", damaged=True)
    with pytest.raises(RefusedError, match="was never evaluated"):
        order(admin, "drafts/promotions", draft=bad)
    models_page.promote(bad, without_evaluation="a test")
    wait_for(lambda: newest(admin)["stage"] not in {"begun", "canary"}, seconds=RESTARTS)
    with site.traffic() as traffic:
        done = ended(admin)
    assert traffic.failures == []
    assert done["stage"] == "refused", done["timeline"]
    assert "collapsed on worker" in done["reason"] or "is the least allowed" in done["reason"]
    assert drafts(admin) == [OLD, OLD]
    assert site.active == ActiveDraft(target=site.target)
    released = [step["text"] for step in done["timeline"] if "is rolled back" in step["text"]]
    assert released == [f"worker {done['canary']} is rolled back"]
    refused_entry, back = site.entries()[-2:]
    assert (refused_entry["step"], refused_entry["reason"]) == ("refused", done["reason"])
    assert (back["type"], back["previous_draft"], back["draft"]) == ("draft.rolled_back", bad, OLD)


@pytest.mark.slow
def test_gateway_killed_in_the_trial_leaves_the_former_draft(site, admin, good):
    """The next gateway finds the worker that has the new draft, and rolls it back."""
    order(admin, "drafts/promotions", draft=good)
    # Without traffic the trial has nothing to decide on.
    wait_for(lambda: newest(admin)["stage"] == "trial", seconds=RESTARTS)
    assert sorted(drafts(admin)) == sorted([OLD, good])
    assert site.active.candidate == good
    site.kill()
    admin = Admin(site.gateway())
    done = ended(admin)
    assert (done["stage"], done["draft"]) == ("interrupted", good)
    assert site.active == ActiveDraft(target=site.target)
    wait_for(lambda: drafts(admin) == [OLD, OLD], seconds=RESTARTS)
    assert [entry.get("step") for entry in site.entries()][-2:] == ["interrupted", None]


@pytest.mark.slow
def test_a_promotion_is_cancelled_in_the_console(site, admin, good, models_page):
    """The worker that had begun with the draft gets its former one again."""
    models_page.promote(good)
    cancel = f"Cancel the promotion of {short(good)}"
    models_page.confirm(".actions", cancel, "The promotion of", reason="a mistake")
    done = ended(admin)
    assert (done["stage"], done["draft"]) == ("rolled_back", good), done["timeline"]
    wait_for(lambda: drafts(admin) == [OLD, OLD], seconds=RESTARTS)
    assert site.active == ActiveDraft(target=site.target)
    assert site.entries()[-1]["reason"] == "a mistake"


def test_promotion_and_rollback_of_a_good_draft_fail_no_request(site, admin, good, models_page):
    """Rolled back in the console; each request's audit entry names the draft that served it."""
    before = len(site.entries())
    with site.traffic() as traffic:
        begun = order(admin, "drafts/promotions", draft=good[7:19])
        assert (begun["draft"], begun["incumbent"]) == (good, OLD)
        with pytest.raises(urllib.error.HTTPError) as refused:
            admin.ask(f"workers/{begun['canary']}/recycle", "POST", {"with_draft": False})
        with refused.value as answer:
            assert answer.code == 409
        done = ended(admin)
        assert done["stage"] == "promoted", done["timeline"]
        wait_for(lambda: drafts(admin) == [good, good], seconds=RESTARTS)
        assert site.active == ActiveDraft(target=site.target, draft=good, previous=(None,))
        answers = traffic.answers
        wait_for(lambda: traffic.answers > answers + 4, seconds=RESTARTS)
        models_page.confirm(".actions", f"Roll back {short(good)}", "Workers leave", reason="a test")
        done = ended(admin)
        assert done["stage"] == "rolled_back", done["timeline"]
        wait_for(lambda: drafts(admin) == [OLD, OLD], seconds=RESTARTS)
    assert traffic.failures == []
    assert site.active == ActiveDraft(target=site.target)
    steps = [(entry["type"], entry.get("step")) for entry in site.entries()[before:]]
    assert steps == [
        *(("draft.tried", step) for step in ("begun", "canary", "trial", "rollout")),
        ("draft.promoted", None),
        ("draft.rolled_back", None),
    ]
    served = {entry.get("draft") for entry in site.entries("request.outcome")}
    assert {OLD, good} <= served
