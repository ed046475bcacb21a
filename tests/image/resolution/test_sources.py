from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.experiment.errors import CapsuleError
from capsule.experiment.spec import SourcesSpec
from capsule.image.resolution.sources import (
    MachineSources,
    machine_sources,
    merge_sources,
    parse_pip_configuration,
    require_folders,
    write_index,
)
from tests.image.conftest import forget_pip_variables


@pytest.fixture
def pip(monkeypatch, tmp_path):
    """A machine whose only pip configuration is one file, which the fixture writes."""
    forget_pip_variables(monkeypatch)

    def write(text: str) -> None:
        (tmp_path / "pip.conf").write_text(text)
        monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    return write


def test_reads_the_machines_own_configuration(pip, monkeypatch):
    pip(
        "[global]\nindex-url = https://mirror.example/simple\n"
        "extra-index-url = https://a.example/simple\n    https://b.example/simple\n"
        "cert = /etc/ca.pem\ntrusted-host = mirror.example\n"
        "[download]\nfind-links = /wheels\n[install]\nno-index = true\n"
    )
    monkeypatch.setenv("PIP_CERT", "/etc/other.pem")
    found = machine_sources(SourcesSpec())
    assert found.index == "https://mirror.example/simple"
    assert found.extra_indexes == ("https://a.example/simple", "https://b.example/simple")
    assert found.find_links == ("/wheels",)
    assert found.cert == "/etc/other.pem"
    assert found.trusted_hosts == ("mirror.example",)
    assert found.no_index is False  # that is another command's
    assert found.configured


def test_a_machine_without_configuration_has_no_sources(pip):
    pip("")
    assert not machine_sources(SourcesSpec()).configured


def test_a_broken_configuration_is_a_coded_error(pip):
    pip("this is not a configuration file\n")
    with pytest.raises(CapsuleError) as caught:
        machine_sources(SourcesSpec())
    assert caught.value.code == "CAP-L101"


@settings(deadline=None, max_examples=100)
@given(
    values=st.dictionaries(
        st.tuples(
            st.sampled_from(["global", "download", ":env:"]), st.sampled_from(["a", "find-links"])
        ),
        st.text(),
    )
)
def test_listing_is_read_as_pip_ranks_it(values):
    listing = "\n".join(f"{section}.{key}={value!r}" for (section, key), value in values.items())
    expected = {}
    for rank in ("global", "download", ":env:"):
        expected |= {key: value for (section, key), value in values.items() if section == rank}
    assert parse_pip_configuration(listing) == expected


def test_spec_adds_to_the_machine_and_its_index_wins():
    machine = {
        "index-url": "https://m.example/simple",
        "extra-index-url": "https://x.example/simple",
        "find-links": "/a\n/b",
    }
    spec = SourcesSpec(
        index="https://s.example/simple",
        extra_indexes=("https://x.example/simple", "https://y.example/simple"),
        find_links=("/c",),
    )
    merged = merge_sources(machine, spec)
    assert merged.index == "https://s.example/simple"
    assert merged.extra_indexes == ("https://x.example/simple", "https://y.example/simple")
    assert merged.find_links == ("/a", "/b", "/c")


def test_uv_sees_what_pip_sees(tmp_path):
    sources = MachineSources(
        index="https://alice:secret@m.example/simple",
        extra_indexes=("https://alice:secret@x.example/simple", str(tmp_path / "my index")),
        find_links=("https://alice:secret@pages.example/a,b", str(tmp_path)),
        trusted_hosts=("m.example",),
    )
    arguments = " ".join(sources.uv_arguments())
    assert "--allow-insecure-host m.example" in arguments
    assert "secret" not in arguments  # every user of the machine sees them
    environment = sources.uv_environment(tmp_path / "index")
    assert environment["UV_DEFAULT_INDEX"] == "https://alice:secret@m.example/simple"
    assert environment["UV_INDEX"].split() == [
        (tmp_path / "index").as_uri(),
        "https://alice:secret@x.example/simple",
        f"{tmp_path.as_uri()}/my%20index",
    ]
    # The folder is what the folder index lists.
    assert environment["UV_FIND_LINKS"] == "https://alice:secret@pages.example/a%2Cb"


def test_without_indexes_uv_reads_the_folders_themselves(tmp_path):
    links = (str(tmp_path), str(tmp_path / "a,b"))
    sources = MachineSources(find_links=links, no_index=True)
    assert "--no-index" in sources.uv_arguments()
    environment = sources.uv_environment(tmp_path / "index")
    assert "UV_INDEX" not in environment
    assert environment["UV_FIND_LINKS"] == f"{tmp_path.as_uri()},{tmp_path.as_uri()}/a%2Cb"


def test_uv_environment(monkeypatch):
    monkeypatch.setenv("UV_INDEX_URL", "https://elsewhere.example/simple")
    monkeypatch.setenv("UV_HTTP_TIMEOUT", "7")
    environment = MachineSources(cert="/etc/ca.pem", proxy="http://p.example:3128").uv_environment()
    assert "UV_INDEX_URL" not in environment
    assert environment["UV_HTTP_TIMEOUT"] == "7"
    assert environment["SSL_CERT_FILE"] == "/etc/ca.pem"
    assert environment["HTTPS_PROXY"] == "http://p.example:3128"


def test_pip_environment_takes_folders_with_spaces(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", "/machine")
    folder = tmp_path / "my wheels"
    sources = MachineSources(find_links=("/machine", str(folder)))
    assert sources.pip_environment()["PIP_FIND_LINKS"] == f"/machine {folder.as_uri()}"


def test_folders_are_the_local_ones(tmp_path):
    links = (str(tmp_path), tmp_path.as_uri(), "https://pages.example/", str(tmp_path / "none"))
    assert MachineSources(find_links=links).folders() == [tmp_path, tmp_path]


def test_index_of_local_folders(tmp_path):
    first, second, target = (tmp_path / name for name in ("first", "second", "index"))
    for folder in (first, second, target):
        folder.mkdir()
    for folder, name in (
        (first, "My_Pkg-1.0+cpu-py3-none-any.whl"),
        (second, "My_Pkg-1.0+cpu-py3-none-any.whl"),
        (second, "My_Pkg-1.1-py3-none-any.whl"),
        (second, "other-1.0-py3-none-win32.whl"),
    ):
        (folder / name).write_bytes(b"")
    hashed: list[Path] = []

    def digest(path: Path) -> str:
        hashed.append(path)
        return "ab" * 32

    write_index([first, second], target, digest, lambda name: "win32" not in name)
    assert [path.name for path in target.iterdir()] == ["my-pkg"]
    page = (target / "my-pkg" / "index.html").read_text()
    assert page.count("<a href=") == 2
    assert f"{first.as_uri()}/My_Pkg-1.0%2Bcpu-py3-none-any.whl#sha256={'ab' * 32}" in page
    assert len(hashed) == 2


def test_a_folder_of_wheels_that_is_missing_is_named(tmp_path):
    (tmp_path / "file").touch()
    require_folders(SourcesSpec(find_links=(str(tmp_path), "https://pages.example/w")))
    for name in ("nowhere", "file", "a" * 300):
        folder = tmp_path / name
        for link in (str(folder), folder.as_uri()):
            with pytest.raises(CapsuleError, match=f"find_links: {folder} is not a fol") as caught:
                require_folders(SourcesSpec(find_links=(link,)))
            assert caught.value.code == "CAP-L105"
