"""The repository's promises to its readers: error catalogue, documents, structure."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ruamel.yaml import YAML

from capsule.experiment.spec import ImageSpec
from tests.command_lines import APP

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
CODE = re.compile(r"CAP-[A-Z][0-9]{3}")


def sources(folder="capsule", pattern="*.py"):
    return sorted((ROOT / folder).rglob(pattern))


def codes(text):
    return set(CODE.findall(text))


def test_every_error_code_is_catalogued_and_every_catalogued_code_exists():
    used = set().union(*(codes(path.read_text()) for path in sources()))
    catalogued = [
        CODE.match(line.removeprefix("| "))[0]
        for line in (ROOT / "docs/errors.md").read_text().splitlines()
        if line.startswith("| CAP-")
    ]
    assert len(catalogued) == len(set(catalogued))
    assert used == set(catalogued)


def test_the_command_reference_is_what_the_program_says():
    """To mend it: python scripts/commands_page.py."""
    page = runpy.run_path(str(ROOT / "scripts/commands_page.py"))["page"]
    assert (ROOT / "docs/commands.md").read_text() == page()


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(str(p.relative_to(ROOT)) for p in PAGES)]
)
def test_every_link_to_a_file_leads_somewhere(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_the_readme_shows_only_commands_that_exist():
    readme = (ROOT / "README.md").read_text()
    shown = set(re.findall(r"^ *(?:\$ )?capsule ([a-z]+)", readme, re.MULTILINE))
    assert shown
    assert shown <= APP.commands.keys()


def test_shipped_data_names_no_place():
    for path in (*sources("images", "*.json"), *sources("images", "*.yaml")):
        assert "://" not in path.read_text()


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK = {part: ROOT / "requirements" / f"{part}.txt" for part in ("setup", "host", "train", "dev")}
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def locked(*parts, python):
    """Return the version of each package that is installed with some parts for one Python."""
    versions = {}
    for part in parts:
        for line in re.findall(r"^[a-z].*?(?= \\$)", LOCK[part].read_text(), re.MULTILINE):
            entry = Requirement(line)
            here = {"python_version": python, "python_full_version": f"{python}.0"}
            if entry.marker is None or entry.marker.evaluate(here):
                assert entry.name not in versions, entry.name
                (pin,) = entry.specifier
                assert pin.operator == "=="
                versions[entry.name] = pin.version
    return versions


def check_fit(requirements, versions):
    for text in requirements:
        wanted = Requirement(text)
        version = versions.get(canonicalize_name(wanted.name))
        assert version is not None, f"{text}: not locked, run scripts/lock.py"
        assert wanted.specifier.contains(version), f"{text}: {version} is locked"


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_fits_the_project(python):
    host = locked("setup", "host", python=python)
    check_fit(PROJECT["project"]["dependencies"], host)
    extras = PROJECT["project"]["optional-dependencies"]
    train = locked("setup", "host", "train", python=python)
    check_fit(extras["train"], train)
    everything = locked(*LOCK, python=python)
    for extra in extras.values():
        check_fit(extra, everything)
    check_fit(PROJECT["dependency-groups"]["dev"], everything)
    check_fit(PROJECT["build-system"]["requires"], everything)


@pytest.mark.parametrize("python", PYTHONS)
def test_the_environment_has_the_training_packages_of_a_spec(python):
    versions = locked("setup", "host", "train", python=python)
    check_fit(ImageSpec().packages, versions)


def test_the_lock_holds_digests_and_no_places():
    for path in LOCK.values():
        text = path.read_text()
        assert "/" not in re.sub("^#.*$", "", text, flags=re.MULTILINE)
        for entry in re.split(r"\n(?=[a-z])", re.sub("^#.*\n", "", text, flags=re.MULTILINE)):
            assert re.fullmatch(r"\S+==.*( \\\n    --hash=sha256:[0-9a-f]{64})+\n?", entry), entry


def test_shipped_specs_pin_the_same_versions():
    """A list of packages replaces the default one, so its versions are written out."""
    versions = locked(*LOCK, python="3.11")
    pins = 0
    for folder in ("specs", "examples", "benchmarks"):
        for path in sources(folder, "*.yaml"):
            image = YAML(typ="safe").load(path).get("image") or {}
            pinned = [
                text for text in image.get("packages", ()) if Requirement(text).name in versions
            ]
            check_fit(pinned, versions)
            pins += len(pinned)
    assert pins


# Of the jobs that publish something.
PERMISSIONS = {
    ("release.yml", "publish"): {"contents": "write"},
    ("site.yml", "deploy"): {"pages": "write", "id-token": "write"},
}
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_pin_actions_and_run_scripts_of_this_repository(path):
    text = path.read_text()
    actions = re.findall(r"uses: (.*)", text)
    assert actions
    assert all(re.fullmatch(r"\S+@[0-9a-f]{40} # v[\d.]+", action) for action in actions)
    scripts = re.findall(r"bash (\S+\.sh)", text)
    assert scripts
    assert all((ROOT / script).is_file() for script in scripts)
    workflow = YAML(typ="safe").load(text)
    assert workflow["permissions"] == {}
    for name, job in workflow["jobs"].items():
        expected = PERMISSIONS.get((path.name, name), {"contents": "read"})
        assert job["permissions"] == expected


RIDDLES = (
    r"nobody|somebody|whoever|stranger'?s?|cannot be had|one that is there|count no more"
    r"|go(es)? on from|whom to trust is|is no (report|record|key that)"
)
RIDDLES_IN_CODE = (
    r"be had|go(es)? on|leave (it|them|that) out|no bundle at all|of one's own|user's own|was told"
)


def phrases(pattern, text):
    """Return what the pattern finds in a text, also across the ends of lines and of literals."""
    text = re.sub(r'"\s+f?"', "", text.lower())
    words = re.sub(r"\s+(# )?", " ", text)
    return [hit[0] for hit in re.finditer(rf"\b({pattern})\b", words)]


def files_with(pattern, paths):
    hits = {str(path.relative_to(ROOT)): phrases(pattern, path.read_text()) for path in paths}
    return {path: found for path, found in hits.items() if found}


def test_texts_for_users_avoid_the_worst_phrases():
    """The word list is in CONTRIBUTING.md, which has to quote these."""
    assert files_with(RIDDLES, [ROOT / "README.md", ROOT / "SECURITY.md", *PAGES]) == {}


def test_code_and_schemas_avoid_the_worst_phrases():
    texts = [*sources("schemas", "*.json"), *sources("capsule/report", "*.jinja"), *sources()]
    errors = ROOT / "capsule/host/errors.txt"
    assert files_with(f"{RIDDLES}|{RIDDLES_IN_CODE}", [*texts, errors]) == {}


def test_the_search_for_phrases_finds_them():
    text = 'f(\n    "It was "\n    f"told."\n)\n# He Goes\n# on.\n"""Leave\nit out."""\n'
    assert phrases(RIDDLES_IN_CODE, text) == ["was told", "goes on", "leave it out"]
