"""
A draft's refresh from beginning to end: `python -m benchmarks.draft_refresh`.

Fine-tunes the demo target for some minutes and changes its chat template, so that acceptance falls;
then does what an operator does, by the same commands: harvest, train, evaluate, promote.  Writes what
acceptance was before, in between and after, and how long each step took.  With --work, the
fine-tuned target is kept there, and taken as it is the next time.
"""

import argparse
import random
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from appliance.infra.settings import DEMO_DRAFT, DEMO_TARGET
from appliance.serving.launch import engine_version
from benchmarks.draft_refresh.change import change_target
from benchmarks.draft_refresh.report import GOAL, Findings, Step, markdown
from benchmarks.draft_refresh.site import Pair, Site, open_site
from benchmarks.draft_refresh.traffic import Acceptance, ask_all
from benchmarks.speculation.provenance import RESULTS, provenance_of
from demo.training.corpus import Corpus, load_corpus

REFRESH = ("harvest", "train", "evaluate", "promote")
"""The steps whose time counts: what comes before is what happened to the site."""
SEED = 72
TRIAL_DRAFTS = "600"


@dataclass(slots=True, kw_only=True)
class Script:
    """What has been done so far."""

    say: Callable[[str], None]
    steps: list[Step] = field(default_factory=list)

    @contextmanager
    def step(self, name: str) -> Iterator[list[str]]:
        """Time one step; what is put into the list is what it said."""
        self.say(f"== {name}")
        said: list[str] = []
        began = time.monotonic()
        yield said
        seconds = time.monotonic() - began
        self.steps.append(Step(name=name, seconds=seconds, said="\n".join(said)))
        self.say(f"== {name}: {seconds:.0f} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asks:
    """What is asked: for the harvest, during the trial, and for measuring; none is in two of them."""

    harvested: list[str]
    trial: list[str]
    measured: list[str]


def main() -> None:
    options = parse()
    command = shlex.join(["python", "-m", "benchmarks.draft_refresh", *sys.argv[1:]])
    provenance = provenance_of(command, model="demo-coder, fine-tuned", draft="demo-coder-eagle31")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="appliance-bench-") as scratch:
        work = options.work or Path(scratch)
        findings, script = refresh(work, options)
    page = markdown(replace(provenance, engine=engine_version()), findings, script.steps, REFRESH)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"draft-refresh-{provenance.commit}.md"
    file.write_text(page, encoding="utf-8")
    say(page)
    say(f"wrote {file}")
    if findings.recovered < GOAL:
        raise SystemExit(
            f"benchmarks.draft_refresh: only {findings.recovered:.0%} came back, goal {GOAL:.0%}"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.draft_refresh")
    add = parser.add_argument
    add("--work", type=Path, help="directory that keeps the fine-tuned target (default: a temporary one)")
    add("--target-steps", type=int, default=160, help="steps of fine-tuning (default 160)")
    add("--requests", type=int, default=500, help="requests to harvest from (default 500)")
    add("--measured", type=int, default=40, help="requests of each measurement (default 40)")
    add("--window", type=int, default=256, help="tokens seen at once in training (default 256)")
    add("--minutes", type=float, default=10.0, help="of training (default 10)")
    add("--concurrency", type=int, default=8, help="requests in flight (default 8)")
    add("--out", type=Path, default=RESULTS, help="where results are written")
    return parser.parse_args()


def refresh(work: Path, options: argparse.Namespace) -> tuple[Findings, Script]:
    """Carry the script out."""
    script, corpus = Script(say=say), load_corpus()
    asks = choose(corpus, options)
    changed = work / "changed" / "demo-coder"
    with script.step("original pair"), site_of(DEMO_TARGET, work / "original") as site:
        original = measured(site, asks)
    if not (changed / "model.safetensors").exists():
        with script.step("fine-tune the target"):
            change_target(DEMO_TARGET, changed, corpus, steps=options.target_steps, say=say)
    with site_of(changed, work / "site") as site:
        with script.step("changed target"):
            fallen = measured(site, asks)
        with script.step("traffic"):
            ask_all(site, asks.harvested, concurrency=options.concurrency, say=say)
        draft = prepare(site, script, options)
        with script.step("promote") as said:
            said.extend(promote(site, draft, asks, options))
        with script.step("refreshed draft"):
            refreshed = measured(site, asks)
        with script.step("verify the log") as said:
            said.extend(last_lines(site.command("audit", "verify")))
    return Findings(original=original, fallen=fallen, refreshed=refreshed), script


def prepare(site: Site, script: Script, options: argparse.Namespace) -> str:
    """Harvest, train and evaluate; returns the digest of the new draft, without its prefix."""
    with script.step("harvest") as said:
        said.extend(last_lines(site.command("draft", "harvest", "--purpose", "the template was changed")))
    dataset = newest(site, "datasets/*.json").stem
    with script.step("train") as said:
        how = ("--minutes", str(options.minutes), "--window", str(options.window))
        said.extend(last_lines(site.command("draft", "train", "--dataset", dataset, *how)))
    draft = newest(site, "revisions/*/revision.json").parent.name
    with script.step("evaluate") as said:
        prompts = ("--prompts", str(options.measured))
        said.extend(last_lines(site.command("draft", "evaluate", draft, "--dataset", dataset, *prompts)))
    return draft


def promote(site: Site, draft: str, asks: Asks, options: argparse.Namespace) -> list[str]:
    """Promote the draft under traffic, until the promotion has ended."""
    # At the acceptance it fell to, the monitor may have stopped drafting, and a trial needs drafts.
    site.command("speculation", "on", "--for", "2h", "--note", "the trial needs drafts")
    with ThreadPoolExecutor(max_workers=1) as thread:
        promotion = thread.submit(site.command, "draft", "promote", draft)
        while not promotion.done():
            ask_all(site, asks.trial, concurrency=options.concurrency)
        site.command("speculation", "auto")
        return last_lines(promotion.result())


def measured(site: Site, asks: Asks) -> Acceptance:
    """Acceptance with the most draft tokens at each step, whatever the monitor thinks of it."""
    site.command("speculation", "on", "--for", "1h", "--note", "a measurement")
    ask_all(site, asks.measured[:4], concurrency=2, harvested=False)
    found = ask_all(site, asks.measured, concurrency=2, harvested=False)
    site.command("speculation", "auto")
    say(f"acceptance length {found.acceptance_length:.2f}, {found.tokens_per_second:.0f} tokens/s")
    return found


def choose(corpus: Corpus, options: argparse.Namespace) -> Asks:
    """Split what can be asked, always alike."""
    asks = sorted({ask for ask, _answer in corpus.dialogues})
    random.Random(SEED).shuffle(asks)
    first, second = options.measured, options.measured + options.requests
    return Asks(measured=asks[:first], harvested=asks[first:second], trial=asks[second : second + 60])


@contextmanager
def site_of(target: Path, directory: Path) -> Iterator[Site]:
    """A site on a target with the demo's draft."""
    settings = {"APPLIANCE_DRAFTS__TRIAL_DRAFTS": TRIAL_DRAFTS}
    with open_site(Pair(target=target, draft=DEMO_DRAFT), directory, settings=settings) as site:
        yield site


def newest(site: Site, pattern: str) -> Path:
    """The file of the registry that was written last."""
    registry = site.gateway.data.parent / "drafts"
    return max(registry.glob(pattern), key=lambda path: path.stat().st_mtime_ns)


def last_lines(text: str, count: int = 12) -> list[str]:
    """The end of what a command printed."""
    return text.rstrip().splitlines()[-count:]


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
