# ruff: noqa: INP001
"""Build the documentation site from the Markdown pages in this repository.

The pages are those that GitHub shows, with the same links between them. docs/README.md determines
the navigation. Files to which pages link, such as specs, are part of the site, and a folder to
which a page links gets a page that lists its files. A broken link is an error.

usage: .venv/bin/python scripts/site.py [FOLDER]     FOLDER is site/ by default
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
INDEX = "docs/README.md"
PROJECT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")
MARK = ".capsule-site"  # in a folder that this script wrote
EXCLUDED = ("tests/", ".github/")
LINK = re.compile(r"\]\(([^)\s]+)\)")
CONFIGURATION = """\
[project]
site_name = "Capsule"
site_description = "Makes deep-RL results checkable"
docs_dir = "pages"
site_dir = "site"
use_directory_urls = false
nav = [
{nav}
]

[project.theme]
font = false
features = ["navigation.footer", "navigation.tabs", "content.code.copy"]

[[project.theme.palette]]
media = "(prefers-color-scheme: light)"
scheme = "default"
toggle.icon = "lucide/sun"
toggle.name = "Switch to dark mode"

[[project.theme.palette]]
media = "(prefers-color-scheme: dark)"
scheme = "slate"
toggle.icon = "lucide/moon"
toggle.name = "Switch to light mode"
"""


class Page(HTMLParser):
    """The links of a page of the site, and the anchors in it to which links can lead."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        """Note the link and the name of an element."""
        for name, value in attrs:
            if value is not None and name in ("href", "src"):
                self.links.append(value)
            elif value is not None and name == "id":
                self.places.add(value)


def main(folder: Path) -> int:
    """Build the site in a new folder, or replace an earlier site; return a status."""
    # Only a site that this script wrote is deleted.
    if folder.exists() and any(folder.iterdir()) and not (folder / MARK).exists():
        sys.stderr.write(f"site: {folder} is not empty, and not a site\n")
        return 2
    pages = list(markdown_pages())
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        for page in pages:
            stage(ROOT / page, work / "pages")
            for target in linked_files(page):
                stage(target, work / "pages")
        nav = "\n".join(navigation(pages))
        (work / "zensical.toml").write_text(CONFIGURATION.format(nav=nav))
        command = [str(Path(sys.executable).with_name("zensical")), "build", "--strict"]
        if status := subprocess.run(command, cwd=work, check=False).returncode:
            return status
        broken = list(broken_links(work / "site"))
        for where in broken:
            sys.stderr.write(f"site: {where}\n")
        if broken:
            return 1
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(work / "site", folder)
        (folder / MARK).touch()
    sys.stdout.write(f"site: {len(pages)} pages in {folder}\n")
    return 0


def markdown_pages() -> Iterator[str]:
    """Yield the pages of the repository that belong to the site."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    yield from (page for page in listed.stdout.split() if not page.startswith(EXCLUDED))


def linked_files(page: str) -> Iterator[Path]:
    """Yield the files and folders of the repository to which a page links."""
    for link in LINK.findall((ROOT / page).read_text()):
        path = unquote(urlsplit(link).path)
        target = (ROOT / page).parent / path
        if path and not urlsplit(link).scheme and target.exists() and target.suffix != ".md":
            yield target.resolve()


def stage(source: Path, pages: Path) -> None:
    """Copy a file of the repository to the same place below the pages; list a folder's files."""
    target = pages / source.relative_to(ROOT)
    if source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        return
    if (source / "README.md").exists() or (target / "README.md").exists():
        return
    files = sorted(path for path in source.iterdir() if path.is_file())
    lines = [f"# {source.relative_to(ROOT)}", "", *(f"- [{it.name}]({it.name})" for it in files)]
    for file in files:
        stage(file, pages)
    target.mkdir(parents=True, exist_ok=True)
    (target / "README.md").write_text("\n".join(lines) + "\n")


def navigation(pages: list[str]) -> Iterator[str]:
    """Yield the lines of the navigation: a section for each table of docs/README.md."""
    yield '  {"Capsule" = "README.md"},'
    for section in re.split(r"^## ", (ROOT / INDEX).read_text(), flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        found = [target(link) for link in LINK.findall(text)]
        listed = ", ".join(f'"{page}"' for page in dict.fromkeys(found) if page in pages)
        yield f'  {{"{heading.partition(":")[0]}" = [{listed}]}},'
    listed = ", ".join(f'"{page}"' for page in (INDEX, *PROJECT_PAGES))
    yield f'  {{"Project" = [{listed}]}},'


def target(link: str) -> str:
    """Return the page of the repository to which a link of docs/README.md leads."""
    path = ((ROOT / INDEX).parent / urlsplit(link).path).resolve()
    page = str(path.relative_to(ROOT))
    return "" if page == "README.md" else page


def broken_links(site: Path) -> Iterator[str]:
    """Yield the broken links within a site."""
    found = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    for path, page in found.items():
        if path.name == "404.html":  # it is shown at any address, so its links are absolute
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            to = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            to = to / "index.html" if to.is_dir() else to
            missing = not to.exists() or (
                to in found and unquote(parts.fragment) not in found[to].places
            )
            if missing:
                yield f"{path.relative_to(site)}: {link} leads nowhere"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "site"))
