"""
Draw the Mermaid diagrams of the documentation: `python -m docs.diagrams`, after a diagram was changed.

The sources stay in the pages; the site shows the drawings, which are named after the hash of their source, so
that a page with an old drawing does not build.  Needs npm, its registry, and Chromium.
"""

import hashlib
import re
import subprocess
import tarfile
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent
DRAWINGS = DOCS / "images" / "diagrams"
MERMAID = "mermaid@11.17.2"
DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DRAW = """
const [source, done] = arguments;
mermaid.initialize({startOnLoad: false, theme: "neutral", htmlLabels: false, flowchart: {htmlLabels: false}});
mermaid.render("diagram", source).then(({svg}) => done(svg), (error) => done(`failed: ${error}`));
"""
"""Labels as text: a picture may hold no HTML."""


def drawing_of(source: str) -> str:
    """Place of a drawing in `docs/`."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    return f"{DRAWINGS.relative_to(DOCS).as_posix()}/{digest}.svg"


def main() -> None:
    """Draw all that have no drawing, and remove what no page has."""
    from selenium import webdriver  # noqa: PLC0415 - the site's build needs `drawing_of` only

    pages = [path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))]
    sources = {drawing_of(source): source for page in pages for source in DIAGRAM.findall(page)}
    DRAWINGS.mkdir(exist_ok=True)
    for old in set(DRAWINGS.iterdir()) - {DOCS / place for place in sources}:
        old.unlink()
    with tempfile.TemporaryDirectory() as directory:
        packed = subprocess.run(  # noqa: S603
            ["npm", "pack", "--silent", MERMAID],  # noqa: S607
            cwd=directory,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        with tarfile.open(Path(directory) / packed) as archive:
            archive.extract("package/dist/mermaid.min.js", directory, filter="data")
        page = Path(directory) / "page.html"
        page.write_text('<script src="package/dist/mermaid.min.js"></script>', encoding="utf-8")
        options = webdriver.ChromeOptions()
        for flag in ("--headless", "--no-sandbox", f"--user-data-dir={directory}/profile"):
            options.add_argument(flag)
        browser = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
        try:
            browser.get(page.as_uri())
            for place, source in sources.items():
                drawn = browser.execute_async_script(DRAW, source)
                if not drawn.startswith("<svg"):
                    raise SystemExit(f"{drawn}\n{source}")
                width = re.search(r'viewBox="\S+ \S+ (\S+)', drawn)[1]  # type: ignore[index]
                drawn = drawn.replace('width="100%"', f'width="{width}"', 1)
                drawn = drawn.replace('style="', 'style="background: white; ', 1)
                (DOCS / place).write_text(drawn + "\n", encoding="utf-8")
                print(f"drew docs/{place}")
        finally:
            browser.quit()


if __name__ == "__main__":
    main()
