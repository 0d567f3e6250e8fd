"""
Commands of a training: parent, progress, signals, records.

The training process is a stand-in.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.audit.entry_types import EntryType
from appliance.drafts.registry.active_draft import ActiveDraft, write_active_draft
from appliance.drafts.training import trainer_process
from appliance.drafts.training.parent_draft import choose_parent
from appliance.drafts.training.progress import Point
from appliance.drafts.training.publish import publish, refuse_erased
from appliance.drafts.training.trainer_process import train
from appliance.drafts.training.training_job import Job, JobSample, TrainingSet, sample_lines
from appliance.drafts.training.training_recipe import TrainingRecipe
from appliance.errors import AuditUnavailableError, DraftNotFoundError, DraftRefusedError
from appliance.infra.settings import Settings
from appliance.serving.weights import digest_weights, load_weights
from tests.unit.drafts.registry.site import Site, digest

SAMPLES = tuple(
    JobSample(
        request_id=f"req-{number}",
        digest=f"{number:064x}",
        held_out=number == 3,
        token_ids=(1, 2, 3),
        loss_mask=(False, True, True),
    )
    for number in range(4)
)
JOB = Job(
    run="/runs/one",
    target="/models/target",
    target_digest=digest(1),
    parent=None,
    parent_digest=None,
    dataset=digest(2),
    recipe=TrainingRecipe(steps=3),
)
ENVIRONMENT = {"PATH": os.environ["PATH"], "HOME": "/srv/operator", "AWS_SECRET": "hidden"}


class Dataset:
    """Samples, some of which are erased at some time."""

    def __init__(self, *erased: str) -> None:
        self.manifest = TrainingSet(samples=SAMPLES, missing=0)
        self.missing = 0
        self.erased = set(erased)

    def read(self, held_out: bool):
        for sample in SAMPLES:
            if sample.held_out is held_out and sample.request_id not in self.erased:
                yield sample


@pytest.fixture
def listen(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_process, "MODULE", "tests.unit.drafts.training.pretend_child")

    def run(behaviour: str, *, lines=None, observe=lambda _: None) -> bool:
        return train(
            replace(JOB, corpus=behaviour),
            lines or (lambda: sample_lines(Dataset())),
            log=tmp_path / "log.txt",
            environment=ENVIRONMENT,
            observe=observe,
        )

    return run


def test_every_step_and_the_end_are_reported(listen):
    heard: list[Point] = []
    assert listen("finish", observe=heard.append) is True
    assert [point.step for point in heard] == [1, 2]


def test_why_it_failed_is_one_line(listen):
    with pytest.raises(DraftRefusedError, match=r"^it cannot be trained$"):
        listen("fail")


def test_crash_is_reported_with_the_last_log_line(listen):
    with pytest.raises(DraftRefusedError, match=r"status -9 \(the last words\): run the same command"):
        listen("die")


def test_training_process_gets_an_offline_environment(listen):
    """Only the variables of a worker's environment, and offline."""
    with pytest.raises(DraftRefusedError) as refused:
        listen("environment")
    environment = json.loads(str(refused.value))
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["HOME"] == "/srv/operator"
    assert "AWS_SECRET" not in environment


def test_invalid_sample_ends_the_training(listen):
    def lines():
        yield from list(sample_lines(Dataset()))[:2]
        raise DraftRefusedError("the sample is not the one the manifest names")

    with pytest.raises(DraftRefusedError, match="not the one the manifest names"):
        listen("finish", lines=lines)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_it_with_a_checkpoint(listen, number):
    """The process writes a checkpoint and exits; signal handlers are restored."""
    before = signal.getsignal(number)
    steps: list[Point] = []

    def hear(point: Point) -> None:
        steps.append(point)
        if len(steps) == 3:
            os.kill(os.getpid(), number)

    assert listen("wait", observe=hear) is False
    assert signal.getsignal(number) is before


def test_training_process_ends_when_its_command_is_killed(tmp_path):
    code = (
        "import os\nfrom pathlib import Path\n"
        "from appliance.drafts.training import trainer_process\n"
        "from tests.unit.drafts.training.test_training_command import *\n"
        "trainer_process.MODULE = 'tests.unit.drafts.training.pretend_child'\n"
        "train(replace(JOB, corpus='wait'), lambda: sample_lines(Dataset()), "
        f"log=Path({str(tmp_path / 'log.txt')!r}), environment=ENVIRONMENT, "
        "observe=lambda point: print(point.step, flush=True))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        while command.stdout.readline().strip() != "3":
            pass
        children = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
        assert len(children) == 1
        command.kill()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{children[0]}/stat").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{children[0]}/stat").read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{children[0]}").exists()


@pytest.fixture
def site(tmp_path) -> Site:
    return Site.open(tmp_path / "site")


def settings(site: Site, **worker) -> Settings:
    return Settings.model_validate({"data": {"directory": str(site.place)}, "worker": worker})


def test_training_starts_from_the_active_draft(site):
    first, second = site.draft("first"), site.draft("second")
    target = load_weights(site.made["first"])
    chosen = choose_parent(settings(site, draft=str(first)), site.registry, target, None)
    assert (chosen.path, chosen.digest) == (first, digest_weights(first))
    revision = site.add(second)
    write_active_draft(site.directory, ActiveDraft(target=target.digest, draft=revision.digest))
    chosen = choose_parent(settings(site, draft=str(first)), site.registry, target, None)
    assert chosen.digest == revision.digest == digest_weights(chosen.path)


def test_training_starts_from_the_named_draft(site):
    path = site.draft("first")
    target = load_weights(site.made["first"])
    assert choose_parent(settings(site), site.registry, target, str(path)).path == path
    revision = site.add(path)
    assert choose_parent(settings(site), site.registry, target, revision.hex[:9]).digest == revision.digest
    with pytest.raises(DraftNotFoundError):
        choose_parent(settings(site), site.registry, target, "0123456789")


@pytest.mark.parametrize("worker", [{"draft": None}, {"method": "ngram"}])
def test_without_an_active_draft_training_is_refused(site, worker):
    site.draft("first")
    target = load_weights(site.made["first"])
    with pytest.raises(DraftRefusedError, match="--from-scratch"):
        choose_parent(settings(site, **worker), site.registry, target, None)


def test_parent_that_does_not_fit_is_refused(site):
    path = site.draft("first")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "fc_norm": False}))
    with pytest.raises(DraftRefusedError, match="does not fit its target"):
        choose_parent(settings(site), site.registry, load_weights(site.made["first"]), str(path))


class Journal:
    """An audit log that can fail."""

    def __init__(self, fails_at: int = 99) -> None:
        self.entries: list[tuple[EntryType, dict]] = []
        self._fails_at = fails_at

    def __call__(self, entry_type: EntryType, fields: dict) -> int:
        if len(self.entries) == self._fails_at:
            raise AuditUnavailableError("the disk is full")
        self.entries.append((entry_type, fields))
        return len(self.entries)


def trained(site: Site) -> Path:
    return site.draft(
        "new",
        dataset=digest(5),
        parent=digest(6),
        samples=7,
        missing=2,
        recipe={"tool": "a tool", "steps": 9},
    )


def test_trained_draft_is_recorded_and_registered(site):
    path, journal = trained(site), Journal()
    target = load_weights(site.made["new"])
    name = publish(path, target, registry=site.registry, signer=lambda: site.signer, journal=journal)
    assert name == digest_weights(path)
    revision = site.registry.find(name)
    assert (revision.source, revision.target, revision.dataset) == ("trained", target.digest, digest(5))
    (first, training), (second, entry) = journal.entries
    assert (first, second) == (EntryType.DRAFT_TRAINED, EntryType.DRAFT_IMPORTED)
    assert training | {"record": ""} == {
        "draft": name, "target": target.digest, "parent": digest(6), "dataset": digest(5),
        "record": "", "recipe": "a tool", "samples": 7, "missing": 2,
    }  # fmt: skip
    assert entry["signer"] == site.signer.verifier_key.name
    publish(path, target, registry=site.registry, signer=lambda: site.signer, journal=journal)
    assert len(journal.entries) == 2


@pytest.mark.parametrize("fails_at", [0, 1])
def test_what_cannot_be_recorded_is_not_registered(site, fails_at):
    path = trained(site)
    target = load_weights(site.made["new"])
    with pytest.raises(AuditUnavailableError):
        publish(path, target, registry=site.registry, signer=lambda: site.signer, journal=Journal(fails_at))
    assert site.registry.revisions() == ()
    publish(path, target, registry=site.registry, signer=lambda: site.signer, journal=Journal())
    assert len(site.registry.revisions()) == 1


def test_draft_trained_on_content_erased_meanwhile_is_not_registered(tmp_path):
    (tmp_path / "used.txt").write_text("".join(f"req-{number} {number:064x}\n" for number in range(3)))
    refuse_erased(tmp_path, Dataset())
    refuse_erased(tmp_path, Dataset("req-3"))
    with pytest.raises(DraftRefusedError, match="1 of the 3 samples were erased"):
        refuse_erased(tmp_path, Dataset("req-1"))
