"""
Hooks of `mkdocs.yml`: pages outside `docs/` join the site, and its policy names the inline scripts.
"""

import base64
import hashlib
import html
import posixpath
import re
from importlib.metadata import distribution
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure import StructureItem
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page

from docs.diagrams import DIAGRAM, drawing_of

ROOT = Path(__file__).parents[1]
PROJECT = "project/"
"""Folder of the site for files that are not in `docs/`."""
OUTSIDE = (
    "*.md",
    "appliance/audit/verify.py",
    "benchmarks/results/*.md",
    "benchmarks/results/*.svg",
    "benchmarks/results/*.png",
)
SECTIONS = ("tutorial", "how-to", "explanation", "reference", "runbooks", "decisions", "project")
LAST_FOUND = ("decisions", "project")
"""Sections whose pages follow the others in search results."""
OPENAPI, OPENAPI_PAGE = "reference/openapi.json", "reference/openapi.md"
POLICY_FILE = "content-security-policy.txt"
DIRECTIVES = (
    "default-src 'none'; connect-src 'self'; font-src 'self'; frame-src 'self'; img-src 'self' data:; "
    "worker-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)

SHIPPED, LICENSES = ("mkdocs-material", "mkdocs-swagger-ui-tag"), ("LICENSE", "NOTICE")
"""Whose scripts and styles the site has, and their files that have to come along."""

ITEM = re.compile(r"(?:[-*+]|\d+[.)]) +(?=\S)")
CODE_BLOCK = re.compile(r"^( *```+).*?^\1 *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(
    r"(?P<opening>!?\[)(?P<text>(?:[^\[\]]|\[[^\]]*\]\([^)]*\))*)\]\((?P<target>[^()\s#]+)(?P<anchor>#\S*)?\)"
)
INLINE = {
    "script-src": (
        r"<script(?![^>]*(?:\bsrc=|application/json))[^>]*>(.*?)</script>",
        r"<[a-z][^<>]*\son[a-z]+=\"([^\"]*)\"",
    ),
    "style-src": (r"<style[^>]*>(.*?)</style>", r"<[a-z][^<>]*\sstyle=\"([^\"]*)\""),
}
"""By directive of the policy, what is inline: elements, and attributes of elements."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            at = PROJECT + path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, at, abs_src_path=str(path)))
    browser = f'# OpenAPI document\n\n<swagger-ui src="{posixpath.basename(OPENAPI)}"/>\n'
    files.append(File.generated(config, OPENAPI_PAGE, content=browser))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """
    Point links at places of the site, and show the drawings of diagrams.

    Where the site has no such file, the text of the link is kept, with the path.
    """
    here = page.file.src_uri
    for source in DIAGRAM.findall(markdown):
        place = posixpath.relpath(drawing_of(source), posixpath.dirname(here))
        markdown = markdown.replace(f"```mermaid\n{source}```", f"![Diagram]({place})")
    section = here.partition("/")[0]
    if section in LAST_FOUND:
        page.meta["search"] = {"boost": 0.5}

    def rewritten(link: re.Match[str]) -> str:
        if "://" in link["target"]:
            return link[0]
        source = here.removeprefix(PROJECT) if section == "project" else f"docs/{here}"
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link["target"]))
        place = path.removeprefix("docs/") if path.startswith("docs/") else PROJECT + path
        file = files.get_file_from_path(OPENAPI_PAGE if place == OPENAPI else place)
        if file is None or file.inclusion.is_excluded():
            return f"{link['text']} (`{path}`)" if (ROOT / path).exists() else link[0]
        relative = posixpath.relpath(file.src_uri, posixpath.dirname(here))
        return f"{link['opening']}{link['text']}]({relative}{link['anchor'] or ''})"

    parts, end = [], 0
    for block in CODE_BLOCK.finditer(markdown):
        parts += [LINK.sub(rewritten, markdown[end : block.start()]), block[0]]
        end = block.end()
    return _indent_by_four("".join([*parts, LINK.sub(rewritten, markdown[end:])]))


def _indent_by_four(markdown: str) -> str:
    """
    Rewrite lists from CommonMark, in which the pages are written, for Python-Markdown.

    What belongs to an item is indented by four spaces, not to the item's text, and an item that follows a
    paragraph has an empty line before it.
    """
    lines, items, fence, is_tight = [], [0], "", False
    for line in markdown.splitlines():
        text = line.lstrip(" ")
        indent = len(line) - len(text)
        item = None if fence else ITEM.match(text)
        if text and not fence:
            while indent < items[-1]:
                items.pop()
        if item and not is_tight and lines and lines[-1]:
            lines.append("")
        lines.append(" " * (4 * (len(items) - 1) + max(0, indent - items[-1])) + text if text else "")
        if item:
            items.append(indent + item.end())
        is_tight = bool(item or (text and is_tight))
        if text.startswith("```"):
            fence = "" if fence else "```"
    return "\n".join(lines) + "\n"


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:  # noqa: ARG001
    def rank(item: StructureItem) -> int:
        while isinstance(item, Section):
            item = item.children[0]
        folder = item.file.src_uri.partition("/")[0] if isinstance(item, Page) else ""
        return SECTIONS.index(folder) if folder in SECTIONS else -1

    nav.items.sort(key=rank)
    return nav


def on_post_build(config: MkDocsConfig) -> None:
    """Write the content security policy under which the gateway serves the site, and the licences."""
    site = Path(config.site_dir)
    terms = [file for name in SHIPPED for file in distribution(name).files or () if file.name in LICENSES]
    texts = [f"{file}\n\n{file.locate().read_text(encoding='utf-8')}" for file in terms]
    (site / "licenses.txt").write_text("\n".join(texts), encoding="utf-8")
    for path in site.rglob("*.map"):
        path.unlink()
    pages = [path.read_text(encoding="utf-8") for path in site.rglob("*.html")]
    directives = [DIRECTIVES]
    for directive, (element, attribute) in INLINE.items():
        inline = {text for page in pages for text in re.findall(element, page, re.DOTALL)}
        inline |= {html.unescape(text) for page in pages for text in re.findall(attribute, page)}
        sources = sorted(f"'sha256-{_digest(text)}'" for text in inline)
        directives.append(f"{directive} 'self' 'unsafe-hashes' {' '.join(sources)}")
    (site / POLICY_FILE).write_text("; ".join(directives) + "\n", encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
