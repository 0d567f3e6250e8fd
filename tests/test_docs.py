"""
The documentation agrees with the code it describes.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.api.documentation import BUILT_SITE
from appliance.audit.entry_types import EntryType
from appliance.infra.settings import DEMO_DRAFT, DEMO_TARGET, Settings
from docs.generate import PAGES, PAGES_AT
from docs.promises import load_promises, not_passed, plain
from tests.command_line import assert_command_exists

ROOT = Path(__file__).parents[1]
PROSE = [
    path
    for pattern in ("*.md", "docs/**/*.md", "demo/**/*.md", "benchmarks/**/*.md")
    for path in sorted(ROOT.glob(pattern))
]
CURRENT = [path for path in PROSE if "results" not in path.parts]
"""Pages about the tree as it is; results of benchmarks describe that of their commit."""


MADE = {
    *(ROOT / name for name in ("build", "data", "dist")),
    ROOT / "tests" / "grafana" / "node_modules",
    BUILT_SITE,
}
"""Folders of the checkout that commands make, such as `make run`: another test may be making one now."""


def files_below(directory: Path) -> Iterator[Path]:
    for path in directory.iterdir():
        if path in MADE or path.is_symlink() or path.name.startswith((".", "__")):
            continue
        if path.is_dir():
            yield from files_below(path)
        else:
            yield path


@pytest.mark.parametrize("name", PAGES)
def test_reference_pages_match_the_code(name):
    """If this fails, run `python -m docs.generate`."""
    assert (PAGES_AT / name).read_text(encoding="utf-8") == PAGES[name]()


@pytest.mark.parametrize("page", PROSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_name_files_that_exist(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_page_is_reachable_from_the_index():
    docs = ROOT / "docs"
    found, unread = set(), [docs / "README.md"]
    while unread:
        page = unread.pop()
        if page in found:
            continue
        found.add(page)
        if page.suffix == ".md":
            targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
            linked = [(page.parent / target).resolve() for target in targets if "://" not in target]
            unread += [path for path in linked if path.is_file() and path.is_relative_to(docs)]
    pages = {path for pattern in ("**/*.md", "reference/*") for path in docs.glob(pattern)}
    assert not pages - found


@pytest.mark.parametrize("page", CURRENT, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_named_in_the_docs_exist(page):
    folders = "appliance|benchmarks|demo|deploy|docs|tests"
    named = re.findall(rf"`((?:{folders})/[\w./-]+\.\w+)`", page.read_text(encoding="utf-8"))
    assert not [path for path in named if not (ROOT / path).exists()]


def test_paths_on_the_architecture_page_exist():
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:/|\.py))`", page))
    assert paths
    assert not [path for path in paths if not any((at / path).exists() for at in (ROOT, ROOT / "appliance"))]


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "how-to").glob("*.md")), ids=lambda path: path.name)
def test_how_tos_begin_with_the_result_and_what_is_needed(page):
    opening = page.read_text(encoding="utf-8").split("\n## ")[0]
    assert "**Result:**" in opening
    assert "**You need:**" in opening


@pytest.mark.parametrize("page", PROSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_code_blocks_exist(page):
    """Every `make` target, and every `appliance` command with its options."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", "").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["make"]:
                assert words[1] in targets, line
            elif words and words[0].rpartition("/")[2] == "appliance":
                assert_command_exists(words[1:], line)


AUDITORS = [ROOT / "docs" / "explanation" / name for name in ("compliance.md", "audit-trust-model.md")]


@pytest.mark.parametrize("page", AUDITORS, ids=lambda path: path.name)
def test_pages_for_auditors_name_only_what_exists(page):
    """Commands, settings, metrics and entry types."""
    settings = {
        f"{section}.{field}"
        for section, model in Settings.model_fields.items()
        for field in model.annotation.model_fields
    }
    metrics = PAGES["metrics.md"]()
    spans = re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))
    for span in spans:
        if span.startswith("appliance "):
            assert_command_exists(shlex.split(span)[1:], span)
        elif span.startswith("appliance_"):
            assert f"`{span}`" in metrics, span
        elif re.fullmatch(r"(request|worker|speculation|draft|tenant|key|config|audit|hold)\.[a-z_]+", span):
            assert span in {*EntryType, *settings, "audit.db", "audit.key", "audit.head"}, span
    assert any(span.startswith("appliance ") for span in spans)


def test_compliance_page_claims_only_entry_types_that_are_written():
    page = (ROOT / "docs" / "explanation" / "compliance.md").read_text(encoding="utf-8")
    claimed, _, rest = page.partition("Registered, but written by nothing yet:")
    admitted = set(re.findall(r"`([^`]+)`", rest.partition("\n\n")[0]))
    code = "\n".join(
        path.read_text(encoding="utf-8")
        for path in files_below(ROOT / "appliance")
        if path.suffix == ".py" and path.name not in {"registry.py", "verify.py"}
    )
    unwritten = {str(kind) for kind in EntryType if f"EntryType.{kind.name}" not in code}
    assert admitted == unwritten
    assert not {kind for kind in unwritten if f"`{kind}`" in claimed}


def test_first_code_block_of_the_readme_is_make_run_and_make_test():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first = re.search(r"```sh\n(.*?)```", text, re.DOTALL)
    assert [line.split("#")[0].strip() for line in first[1].splitlines()] == ["make run", "make test"]


def test_weights_of_the_demo_pair_stay_within_24_mib():
    files = [*DEMO_TARGET.glob("*.safetensors"), *DEMO_DRAFT.glob("*.safetensors")]
    assert len(files) == 2
    assert sum(path.stat().st_size for path in files) <= 24 * 2**20


def test_no_file_has_an_absolute_path_of_a_developers_machine():
    homes = re.compile(rb"(?:/work/|/root/|/home/)[a-z.]")
    assert not [path for path in files_below(ROOT) if homes.search(path.read_bytes())]


PROMISES = load_promises()


@pytest.mark.parametrize("page", PROMISES)
def test_every_promise_stands_on_its_page(page):
    """A sentence that changes takes its entry in `docs/promises.yaml` along."""
    text = plain((ROOT / page).read_text(encoding="utf-8"))
    assert [promise.text for promise in PROMISES[page] if promise.text not in text] == []


def test_every_promise_names_tests_that_exist():
    named = {test for promises in PROMISES.values() for promise in promises for test in promise.tests}
    missing = []
    for path, _, name in (test.partition("::") for test in sorted(named)):
        text = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).exists() else ""
        if not re.search(rf"^ *(?:async )?def {name.rpartition('::')[2]}\(", text, re.MULTILINE):
            missing.append(f"{path}::{name}")
    assert missing == []
    assert all(promise.tests for promises in PROMISES.values() for promise in promises)


def test_every_page_that_promises_something_is_on_the_list():
    pages = {"README.md", "SECURITY.md"}
    pages |= {str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "explanation").glob("*.md")}
    generated = {f"docs/explanation/{Path(name).name}" for name in PAGES if "explanation" in name}
    assert set(PROMISES) == pages - generated


def test_a_promise_whose_test_did_not_pass_is_reported(tmp_path):
    named = sorted({test for promises in PROMISES.values() for promise in promises for test in promise.tests})
    (tmp_path / "1").write_text("\n".join(named[1:]), encoding="utf-8")
    assert not_passed(tmp_path) == named[:1]
