"""The refresh of drafts in `deploy/compose.yaml`, and the program that it and the chart's Job run."""

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
import yaml

from appliance.cli.draft import evaluate, harvest, train
from appliance.drafts.evaluation.evaluation_results import Evaluation, EvaluationVerdict
from appliance.drafts.harvest.conversation import Skipped
from appliance.drafts.harvest.dataset_manifest import DatasetManifest
from appliance.infra.settings import load_settings
from appliance.sovereignty.bundle.signature import parse_trusted_keys
from tests.deploy.container_engine import ROOT
from tests.deploy.test_compose import SERVICES, default_of

AT = ROOT / "deploy"
PROGRAM = AT / "images" / "refresh.py"
DATASET, DRAFT = f"sha256:{'d' * 64}", f"sha256:{'a' * 64}"
SECONDS = 60

FAKE_APPLIANCE = """#!{python}
import json, os, pathlib, signal, sys, time
place = pathlib.Path(__file__).parent
with (place / "calls").open("a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
step = sys.argv[2]
does = json.loads((place / "does.json").read_text()).get(step, {{}})
if does.get("hangs"):
    def stop(*_):
        (place / "stopped").touch()
        sys.exit(130)
    signal.signal(signal.SIGTERM, stop)
    (place / "hanging").touch()
    time.sleep({seconds})
sys.stdout.write(does.get("prints", ""))
sys.exit(does.get("code", 0))
"""
"""A stand-in for the command with a given output; the real commands have their own tests."""
WELL = {
    "harvest": {"prints": f"data set    {DATASET}\nsamples     3, 90 tokens\n"},
    "train": {
        "prints": f"report in runs/{'b' * 12}/draft/report.html\n{DRAFT} is registered; evaluate tells\n"
    },
    "evaluate": {"prints": json.dumps({"draft": DRAFT, "verdict": "passed"}) + "\n"},
}
REFUSED = {"evaluate": {"prints": json.dumps({"draft": DRAFT, "verdict": "refused"}), "code": 1}}


class Machine:
    """A directory with scripted commands, and the program run with them."""

    def __init__(self, directory: Path) -> None:
        self.bin, self.state = directory / "bin", directory / "state"
        self.bin.mkdir()
        self._put("appliance", FAKE_APPLIANCE.format(python=sys.executable, seconds=SECONDS))
        self.does(WELL)

    def does(self, *said: dict) -> None:
        """Have the commands print and end so."""
        together = {step: what for each in said for step, what in each.items()}
        (self.bin / "does.json").write_text(json.dumps(together), encoding="utf-8")

    def gpus(self, shown: str) -> None:
        """Have `nvidia-smi` show this."""
        self._put("nvidia-smi", f"#!{sys.executable}\nprint({shown!r})\n")

    def command(self, *words: str) -> list[str]:
        fixed = ["--config", "settings.yaml", "--state", str(self.state), "--purpose", "ticket 7"]
        return [sys.executable, "-I", str(PROGRAM), *fixed, *words]

    def refresh(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
            env=self.environment(),
        )

    def environment(self) -> dict[str, str]:
        return {"PATH": str(self.bin), "HOME": str(self.state)}

    def calls(self) -> list[list[str]]:
        """Every command that was run, without its first two words."""
        file = self.bin / "calls"
        if not file.exists():
            return []
        return [json.loads(line)[1:] for line in file.read_text(encoding="utf-8").splitlines()]

    def steps(self) -> list[str]:
        return [call[0] for call in self.calls()]

    def _put(self, name: str, text: str) -> None:
        program = self.bin / name
        program.write_text(text, encoding="utf-8")
        program.chmod(0o755)


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


def test_refresh_harvests_trains_and_evaluates(machine):
    """Each step gets the result of the one before; the last line has the command to promote."""
    more = ("--harvest=--max-samples", "--harvest=9", "--train=--unroll", "--train=5")
    done = machine.refresh("--minutes", "5", *more)
    assert done.returncode == 0, done.stderr
    config = ["--config", "settings.yaml"]
    assert machine.calls() == [
        ["harvest", "--purpose", "ticket 7", "--max-samples", "9", *config],
        ["train", "--dataset", DATASET, "--minutes", "5.0", "--unroll", "5", *config],
        ["evaluate", DRAFT, "--dataset", DATASET, "--json", *config],
    ]
    assert done.stderr.splitlines()[-1].endswith(f"appliance draft promote {DRAFT}")
    assert "promote" not in machine.steps(), "that is an operator's decision"


def test_a_training_is_bounded_by_minutes_or_by_steps(machine):
    """Never by both, which the command refuses; `speculators` counts steps."""
    assert machine.refresh("--run", "a", "--steps", "40").returncode == 0
    assert machine.refresh("--run", "b").returncode == 0
    trained = [call for call in machine.calls() if call[0] == "train"]
    assert [call[3:5] for call in trained] == [["--steps", "40"], ["--minutes", "60.0"]]


def test_a_draft_that_was_refused_ends_the_run_with_a_code_of_its_own(machine):
    """The Job fails on 3; the same run does nothing more and exits with the same code."""
    machine.does(WELL, REFUSED)
    assert machine.refresh("--run", "a").returncode == 3
    again = machine.refresh("--run", "a")
    assert (again.returncode, len(machine.calls())) == (3, 3)
    assert "nothing is done" in again.stderr
    assert machine.refresh("--run", "b").returncode == 3
    assert machine.steps() == ["harvest", "train", "evaluate"] * 2


@pytest.mark.parametrize(("broken", "again"), [("harvest", 3), ("train", 2), ("evaluate", 1)])
def test_only_the_failed_step_is_repeated(machine, broken, again):
    """Its exit code is returned; earlier results are used."""
    machine.does(WELL, {broken: {"code": 5, "prints": ""}})
    assert machine.refresh("--run", "a").returncode == 5
    before = len(machine.calls())
    machine.does(WELL)
    assert machine.refresh("--run", "a").returncode == 0
    assert machine.steps()[before:] == ["harvest", "train", "evaluate"][-again:]


@pytest.mark.parametrize("step", ["harvest", "train"])
def test_step_without_a_result_line_fails(machine, step):
    """The program never guesses the data set or draft."""
    machine.does(WELL, {step: {"prints": f"not at the beginning of a line {DRAFT}\n"}})
    done = machine.refresh()
    assert (done.returncode, machine.steps()[-1]) == (1, step)


def test_failed_evaluation_is_not_a_refusal(machine):
    """It ends with the same code as a refusal, without a report: that is tried again."""
    machine.does(WELL, {"evaluate": {"code": 1, "prints": ""}})
    assert machine.refresh("--run", "a").returncode == 1
    assert json.loads((machine.state / "a.json").read_text(encoding="utf-8"))["verdict"] is None


def test_refresh_without_a_name_resumes_the_unfinished_run(machine):
    """And once it has ended, another is begun."""
    machine.does(WELL, {"train": {"code": 1}})
    assert machine.refresh().returncode == 1
    machine.does(WELL)
    assert machine.refresh().returncode == 0
    assert machine.steps() == ["harvest", "train", "train", "evaluate"]
    assert len(list(machine.state.glob("*.json"))) == 1
    time.sleep(1.1)  # names are of whole seconds
    assert machine.refresh().returncode == 0
    assert len(list(machine.state.glob("*.json"))) == 2


def test_unreadable_state_is_an_error_not_an_empty_state(machine):
    """Otherwise content would be read a second time; no temporary file is left."""
    assert machine.refresh("--run", "a").returncode == 0
    assert [path.name for path in machine.state.iterdir()] == ["a.json"]
    (machine.state / "a.json").write_text("{", encoding="utf-8")
    done = machine.refresh("--run", "a")
    assert (done.returncode, len(machine.calls())) == (1, 3)
    assert "remove it to start again" in done.stderr


@pytest.mark.parametrize(
    "words", [("--run", "../a"), ("--purpose", " "), ("--minutes", "many"), ("--promote",)], ids=" ".join
)
def test_a_command_line_that_is_wrong_runs_nothing(machine, words):
    """The Job gives up on 64: it would be wrong the next time too."""
    done = machine.refresh(*words)
    assert (done.returncode, machine.calls()) == (64, [])


def test_refresh_forwards_sigterm_to_its_step(machine):
    """The command gets the signal, writes its checkpoint and exits; the next run resumes."""
    machine.does(WELL, {"train": {"hangs": True}})
    with subprocess.Popen(machine.command("--run", "a"), env=machine.environment()) as process:
        for _ in range(SECONDS * 10):
            if (machine.bin / "hanging").exists():
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 130
    assert (machine.bin / "stopped").exists()
    machine.does(WELL)
    assert machine.refresh("--run", "a").returncode == 0
    assert machine.steps() == ["harvest", "train", "train", "evaluate"]


@pytest.mark.parametrize(
    ("shown", "code", "says"),
    [
        ("0, 612, 81559", 0, "promote"),
        ("0, 73021, 81559", 75, "GPU 0 is in use (73021 of 81559 MiB)"),
        ("0, 1, 81559\n1, 73021, 81559", 75, "GPU 1 is in use"),
        ("0, [N/A], [N/A]", 0, "promote"),
    ],
    ids=["free", "a worker's", "one of two", "a part of one"],
)
def test_refresh_refuses_a_gpu_in_use(machine, shown, code, says):
    """Nothing is read of any content before that is known."""
    machine.gpus(shown)
    done = machine.refresh("--gpu")
    assert (done.returncode, len(machine.calls())) == (code, 0 if code else 3)
    assert says in done.stderr


def test_refresh_refuses_to_start_without_a_gpu(machine):
    """If the container was given none."""
    done = machine.refresh("--gpu")
    assert (done.returncode, machine.calls()) == (64, [])
    assert "no GPU is here" in done.stderr


REFRESHES = {"refresh": "refresh", "refresh-demo": "refresh-demo"}
"""Services that are run by themselves, and their profiles."""


@pytest.mark.skipif(
    shutil.which("docker-compose") is None,
    reason="DOCKER-COMPOSE 1.29 DOES NOT READ THE REFRESH HERE: install the Debian package docker-compose",
)
@pytest.mark.parametrize("service", REFRESHES)
def test_docker_compose_reads_the_refresh(service):
    """The generation before, too; with the GPU that an operator names, and without one."""
    for given in ({}, {"REFRESH_GPU": "1", "WORKER_GPU": "0"}):
        done = subprocess.run(
            ["docker-compose", "--file", AT / "compose.yaml", "--profile", REFRESHES[service], "config"],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **given},
        )
        assert (done.returncode, done.stderr) == (0, "")
        read = yaml.safe_load(done.stdout)["services"]
        assert read[service]["profiles"] == [REFRESHES[service]]
        if service == "refresh":
            (device,) = devices(read[service])
            assert device["device_ids"] == [given.get("REFRESH_GPU", "none")]


def devices(service: dict) -> list[dict]:
    return service["deploy"]["resources"]["reservations"]["devices"]


@pytest.mark.parametrize("name", REFRESHES)
def test_up_never_starts_a_refresh(name):
    """In a profile of its own, once; on no network but that of records, and without a port."""
    service = SERVICES[name]
    assert service["profiles"] == [REFRESHES[name]]
    assert [other for other in SERVICES if REFRESHES[name] in SERVICES[other].get("profiles", [])] == [name]
    assert service["restart"] == "no"
    assert service["networks"] == ["records"]
    assert "ports" not in service
    assert service["secrets"] == ["database-gateway-password"]
    assert service["entrypoint"][:3] == [
        "/opt/appliance/bin/python",
        "-I",
        "/opt/appliance/refresh.py",
    ]
    assert service["env_file"] == "offline.env"
    assert service["healthcheck"] == {"disable": True}


def test_a_refresh_and_a_worker_are_given_gpus_one_by_one():
    """None unless an operator names it: the runtime reads `none` as no GPU."""
    (worker,), (refresh,) = devices(SERVICES["worker-gpu"]), devices(SERVICES["refresh"])
    assert "count" not in {**worker, **refresh}, "count and device_ids exclude each other"
    assert default_of(worker["device_ids"][0]) == "all"
    assert default_of(refresh["device_ids"][0]) == "none"
    assert SERVICES["refresh"]["entrypoint"][-1] == "--gpu"
    assert "--gpu" not in SERVICES["refresh-demo"]["entrypoint"]


def mounted(service: dict) -> dict[str, tuple[str, bool]]:
    """Where each volume or file is in the container, and whether only to read."""
    split = [default_of(volume).split(":") for volume in service.get("volumes", [])]
    return {place: (source, rest == ["ro"]) for source, place, *rest in split}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gateway", "gateway"),
        ("worker-cpu", "worker-demo"),
        ("worker-gpu", "worker-gpu"),
        ("refresh", "refresh"),
        ("refresh-demo", "refresh-demo"),
    ],
)
def test_registry_is_shared_and_writable_only_for_gateway_and_refresh(name, settings):
    """Workers mount it read-only; every setting names the mount path."""
    read = load_settings(AT / "compose" / f"{settings}.yaml")
    places = mounted(SERVICES[name])
    source, read_only = places["/var/lib/appliance-drafts"]
    assert source == "drafts"
    assert read_only == name.startswith("worker")
    assert str(read.drafts.directory) == "/var/lib/appliance-drafts/registry"
    if name.startswith("worker"):
        assert str(read.drafts.trusted_keys_file) in places
        assert read.drafts.signing_key_file is None


@pytest.mark.parametrize(("name", "worker"), [("refresh", "worker-gpu"), ("refresh-demo", "worker-demo")])
def test_refresh_trains_the_pair_in_service(name, worker):
    """The same target and draft by the same paths, and the gateway's log and keys."""
    refresh, serving = (load_settings(AT / "compose" / f"{each}.yaml") for each in (name, worker))
    gateway = load_settings(AT / "compose" / "gateway.yaml")
    assert refresh.worker.model == serving.worker.model
    assert refresh.worker.draft == serving.worker.draft
    assert refresh.worker.device == serving.worker.device
    assert refresh.data.directory == gateway.data.directory
    assert refresh.audit.origin == gateway.audit.origin
    assert mounted(SERVICES[name])["/var/lib/appliance"] == mounted(SERVICES["gateway"])["/var/lib/appliance"]
    variable = "APPLIANCE_AUDIT__DATABASE_URL"
    assert SERVICES[name]["environment"][variable] == SERVICES["gateway"]["environment"][variable]


def test_no_key_is_trusted_by_default():
    """The file that ships names no key, and says what belongs there."""
    text = (AT / "compose" / "drafts.pub").read_text(encoding="utf-8")
    assert parse_trusted_keys(text) == ()
    assert "appliance draft key" in text


def dockerfile() -> Iterator[str]:
    """Instructions of the Dockerfile, each in one line."""
    text = (AT / "images" / "Dockerfile").read_text(encoding="utf-8")
    yield from text.replace("\\\n", " ").splitlines()


def test_the_images_have_the_program_and_directories_that_a_new_volume_takes_its_owner_from():
    """A volume without a directory in the image belongs to root, and other users could not write to it."""
    assert any(line.startswith("COPY ") and "refresh.py" in line for line in dockerfile())
    assert "refresh.py" in (AT / "images" / "build.sh").read_text(encoding="utf-8")
    (made,) = (line for line in dockerfile() if "install -d -o 10001 -g 0" in line)
    owned = made.partition("for each in ")[2].partition(";")[0].split()
    named = {
        place
        for service in SERVICES.values()
        for place, (source, read_only) in mounted(service).items()
        if not source.startswith(("/", ".")) and not read_only and "sovereign-appliance" in service["image"]
    }
    assert named == set(owned)


def options_of(step: str) -> set[str]:
    """What the real command takes."""
    commands = typer.Typer()
    for module in (harvest, train, evaluate):
        for name, function in module.COMMANDS.items():
            commands.command(name=name)(function)
    command = typer.main.get_command(commands).commands[step]
    return {option for parameter in command.params for option in parameter.opts}


def test_commands_accept_the_arguments_of_refresh(machine):
    """The stand-in above takes anything; these would say `No such option`."""
    assert machine.refresh("--run", "a", "--steps", "40").returncode == 0
    assert machine.refresh("--run", "b", "--train=--backend", "--train=small").returncode == 0
    for step, *words in machine.calls():
        given = {word for word in words if word.startswith("--")}
        assert given
        assert given <= options_of(step), step


def test_refresh_parses_the_output_of_the_commands(capsys):
    """The command itself prints each line; the program parses it."""
    program = runpy.run_path(str(PROGRAM))
    manifest = DatasetManifest(target=DATASET, tokenizer="t", policy="p", made="2026-01-01", samples=())
    harvest._show(manifest, Counter({Skipped.ERASED: 1}))
    assert program["made"]((0, capsys.readouterr().out), "harvest") == manifest.digest
    finished = SimpleNamespace(published=DRAFT, refuse_changed=lambda _identity: True)
    asked = SimpleNamespace(run=finished, job=SimpleNamespace(identity={}))
    train._train_and_publish(asked, None, None)
    assert program["made"]((0, capsys.readouterr().out), "train") == DRAFT
    for verdict in EvaluationVerdict:
        report = Evaluation(
            draft=DRAFT,
            target=DATASET,
            dataset=DATASET,
            verdict=verdict,
            reasons=(),
            made="2026-01-01T00:00:00.000Z",
            engine="vllm",
            device="cpu",
            dtype="float32",
            draft_tokens=3,
            max_tokens=64,
            margin=0.02,
            epsilon=0.001,
            prompts=8,
            compared=8,
            missing=0,
            unusable=0,
        )
        assert program["judged"]((0, report.encode().decode() + "\n")) == verdict
        assert verdict in program["ENDS"]
