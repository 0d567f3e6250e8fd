"""
Drafts taken into service and out of it, on two real vLLM workers behind one gateway, under traffic.
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

from appliance.audit.keys import create_signing_key
from appliance.drafts.evaluation.report import Evaluation, Verdict
from appliance.drafts.evaluation.store import save_evaluation
from appliance.drafts.registry.opening import open_registry, site_signer
from appliance.drafts.registry.standing import Standing, read_standing
from appliance.serving.weights import digest_weights
from appliance.settings import DEMO_DRAFT, DEMO_TARGET, DataSettings, DraftSettings, Settings
from demo.process import ApplianceProcess
from tests.integration.speculation_traffic import Traffic, code
from tests.integration.test_speculation import Admin, entries, verify_log, wait_for
from tests.integration.worker_process import WorkerProcess

pytestmark = [pytest.mark.worker, pytest.mark.long]

RESTARTS = 900.0
"""Seconds that a few restarts and a trial may take on a small machine that does something else as well."""


@dataclass
class Place:
    """Two workers, the directory of drafts they share with the gateway, and how a gateway is started."""

    directory: Path
    environment: dict[str, str]
    workers: tuple[WorkerProcess, WorkerProcess]
    key: str = ""

    @property
    def settings(self) -> Settings:
        """The gateway's, as far as drafts are concerned."""
        drafts = DraftSettings(
            directory=self.directory / "drafts", signing_key_file=self.directory / "drafts.key"
        )
        return Settings(data=DataSettings(directory=self.directory / "data"), drafts=drafts)

    @property
    def target(self) -> str:
        return digest_weights(DEMO_TARGET)

    @property
    def standing(self) -> Standing:
        return read_standing(self.directory / "drafts", self.target)

    def gateway(self) -> ApplianceProcess:
        """Start a gateway where the last one ended."""
        return ApplianceProcess(
            "gateway", data=self.directory / "data", key=self.key, environment=self.environment
        )

    def register(self, name: str, *, damaged: bool) -> str:
        """Register a copy of the demo draft, of another digest; as good as it, or worth nothing."""
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
        return registry.add(copy, target=self.target, how="imported", signer=signer).digest

    def evaluated(self, draft: str) -> None:
        """Keep an evaluation that lets the draft be tried; `test_draft_evaluation` makes real ones."""
        evaluation = Evaluation(
            draft=draft,
            incumbent=digest_weights(DEMO_DRAFT),
            target=self.target,
            dataset=f"sha256:{'d' * 64}",
            verdict=Verdict.PASSED,
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
def place(tmp_path_factory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("promotion")
    (directory / "token").write_text("a shared secret\n", encoding="utf-8")
    create_signing_key(directory / "drafts.key")
    shared = {
        "APPLIANCE_LOG__LEVEL": "warning",
        "APPLIANCE_DATA__CONTROL_TOKEN_FILE": str(directory / "token"),
        "APPLIANCE_DRAFTS__DIRECTORY": str(directory / "drafts"),
        "APPLIANCE_DRAFTS__SIGNING_KEY_FILE": str(directory / "drafts.key"),
    }
    with ExitStack() as stack:
        starting = [WorkerProcess(directory / name, environment=shared) for name in ("first", "second")]
        for worker in starting:
            stack.callback(worker.stop)
        workers = tuple(stack.enter_context(worker) for worker in starting)
        gateway = {
            **shared,
            "APPLIANCE_POOL__URLS": json.dumps([worker.url for worker in workers]),
            # Two workers share two cores here: their speeds differ by more than any two drafts'.
            "APPLIANCE_DRAFTS__TRIAL_DRAFTS": "64",
            "APPLIANCE_DRAFTS__TRIAL_MARGIN": "0.45",
            "APPLIANCE_DRAFTS__TRIAL_SECONDS": "600",
            "APPLIANCE_MONITOR__LEASE_SECONDS": "5",
        }
        yield Place(directory=directory, environment=gateway, workers=workers)
    assert verify_log(directory / "data") == 0


def drafts(admin: Admin) -> list[str]:
    """What the workers say they run with; nothing of one that is down."""
    return [worker["draft"] for worker in admin.ask("drafts")["workers"] if worker["takes_requests"]]


def newest(admin: Admin) -> dict[str, Any]:
    return admin.ask("drafts")["promotions"][0]


def ended(admin: Admin) -> dict[str, Any]:
    """Wait until the newest promotion or rollback is over."""

    def over() -> dict[str, Any] | None:
        promotion = newest(admin)
        return promotion if promotion["over"] else None

    return wait_for(over, seconds=RESTARTS)


def ready(gateway: ApplianceProcess, place: Place) -> Admin:
    """Wait until the gateway steers and sees both workers with the draft of the settings."""
    place.key = place.key or gateway.key
    admin, old = Admin(gateway), digest_weights(DEMO_DRAFT)
    wait_for(lambda: admin.ask("drafts")["acting"] and drafts(admin) == [old, old], seconds=RESTARTS)
    time.sleep(2)
    return admin


def test_a_good_draft_comes_into_service_and_out_again_and_no_request_fails(place):
    """Both workers serve with it, and then both with the former one; each request's entry says with which."""
    old, new = digest_weights(DEMO_DRAFT), place.register("as-good", damaged=False)
    place.evaluated(new)
    with place.gateway() as gateway:
        admin = ready(gateway, place)
        with Traffic(gateway, clients=2, prompt=code(), pause_seconds=0.3).running() as traffic:
            begun = admin.ask("drafts/promotions", "POST", {"draft": new[7:19]})
            assert (begun["draft"], begun["incumbent"]) == (new, old)
            with pytest.raises(urllib.error.HTTPError) as refused:
                admin.ask(f"workers/{begun['canary']}/recycle", "POST", {"with_draft": False})
            with refused.value as answer:
                assert answer.code == 409
            done = ended(admin)
            assert done["stage"] == "promoted", done["timeline"]
            wait_for(lambda: drafts(admin) == [new, new], seconds=30)
            assert place.standing == Standing(target=place.target, draft=new, previous=(None,))
            answers = traffic.answers
            wait_for(lambda: traffic.answers > answers + 4, seconds=60)
            admin.ask("drafts/rollbacks", "POST", {"reason": "a test"})
            done = ended(admin)
            assert done["stage"] == "rolled_back", done["timeline"]
            wait_for(lambda: drafts(admin) == [old, old], seconds=30)
        assert traffic.failures == []
        assert place.standing == Standing(target=place.target)
    log = entries(place.directory / "data")
    tried = [entry["step"] for entry in log if entry["type"] == "draft.tried"]
    assert tried == ["begun", "canary", "trial", "rollout"]
    assert [entry["type"] for entry in log if entry["type"] in {"draft.promoted", "draft.rolled_back"}] == [
        "draft.promoted",
        "draft.rolled_back",
    ]
    served = {entry.get("draft") for entry in log if entry["type"] == "request.outcome"}
    assert {old, new} <= served
    assert verify_log(place.directory / "data") == 0


def test_a_damaged_draft_is_given_back_by_itself(place):
    """Somebody let it past the evaluation; one worker found out, and the other never had it."""
    old, bad = digest_weights(DEMO_DRAFT), place.register("damaged", damaged=True)
    with place.gateway() as gateway:
        admin = ready(gateway, place)
        with pytest.raises(urllib.error.HTTPError) as refused:
            admin.ask("drafts/promotions", "POST", {"draft": bad})
        with refused.value as answer:
            assert "was never evaluated" in json.load(answer)["error"]["message"]
        with Traffic(gateway, clients=2, prompt=code(), pause_seconds=0.3).running() as traffic:
            admin.ask("drafts/promotions", "POST", {"draft": bad, "without_evaluation": "a test"})
            done = ended(admin)
        assert traffic.failures == []
        assert done["stage"] == "refused", done["timeline"]
        assert "collapsed on worker" in done["reason"] or "is the least allowed" in done["reason"]
        assert drafts(admin) == [old, old]
        assert place.standing == Standing(target=place.target)
        given_back = [step["text"] for step in done["timeline"] if "is given back" in step["text"]]
        assert given_back == [f"worker {done['canary']} is given back"]
    refused_entry, back = [
        entry for entry in entries(place.directory / "data") if entry["type"].startswith("draft.")
    ][-2:]
    assert (refused_entry["step"], refused_entry["reason"]) == ("refused", done["reason"])
    assert (back["type"], back["previous_draft"], back["draft"]) == ("draft.rolled_back", bad, old)


def test_a_gateway_that_is_killed_in_the_trial_leaves_the_former_draft(place):
    """The next one finds the worker that has the new draft, gives it back, and can promote again."""
    old, new = digest_weights(DEMO_DRAFT), place.register("interrupted", damaged=False)
    place.evaluated(new)
    gateway = place.gateway()
    try:
        gateway.wait_ready()
        admin = ready(gateway, place)
        admin.ask("drafts/promotions", "POST", {"draft": new})
        # Nobody asks anything, so the trial has nothing to decide on.
        wait_for(lambda: newest(admin)["stage"] == "trial", seconds=RESTARTS)
        assert sorted(drafts(admin)) == sorted([old, new])
        assert place.standing.candidate == new
    finally:
        gateway.process.kill()
        gateway.stop()
        assert gateway.process.stdout is not None
        gateway.process.stdout.close()
    with place.gateway() as gateway:
        admin = ready(gateway, place)
        done = ended(admin)
        assert (done["stage"], done["draft"]) == ("interrupted", new)
        assert place.standing == Standing(target=place.target)
        assert drafts(admin) == [old, old]
        steps = [
            entry.get("step") for entry in entries(place.directory / "data") if entry["type"] == "draft.tried"
        ]
        assert steps[-1] == "interrupted"
        again = admin.ask("drafts/promotions", "POST", {"draft": new})
        assert again["stage"] == "begun"
        admin.ask("drafts/rollbacks", "POST", {"reason": "that was all"})
        assert ended(admin)["stage"] == "rolled_back"
        assert drafts(admin) == [old, old]
