"""A mirror of an archive of packages on the loopback interface, with a signing key of its own."""

from __future__ import annotations

import functools
import hashlib
import lzma
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from pysequoia import SignatureMode, Tsk, sign

from capsule.image.resolution import indexes

INDEX = "main/binary-amd64/Packages.xz"
Packages = Sequence[Mapping[str, str]]


@dataclass
class Mirror:
    """A served folder.

    Attributes:
        folder: What is served.
        address: Where.
        asked: Paths that were asked for, in order.
    """

    folder: Path
    address: str
    key: Tsk
    asked: list[str] = field(default_factory=list)

    def publish(
        self,
        packages: Packages,
        *,
        universe: Packages | None = None,
        below: str = "debian",
        suite: str = "bookworm",
        origin: str = "Debian",
        codename: str | None = None,
        until: str | None = None,
        key: Tsk | None = None,
    ) -> str:
        """Write the indexes of a suite and sign them; return the address of its archive."""
        place = self.folder / below / "dists" / suite
        listed = [_index(place, INDEX, packages)]
        if universe is not None:
            listed.append(_index(place, INDEX.replace("main", "universe"), universe))
        release = f"Origin: {origin}\nCodename: {codename or suite}\n"
        release += f"Valid-Until: {until}\n" if until else ""
        release += f"MD5Sum:\n {'0' * 32} 1 {INDEX}\nSHA256:\n{''.join(listed)}"
        signer = (key or self.key).signer()
        signed = sign(signer, release.encode(), mode=SignatureMode.CLEAR)
        (place / "InRelease").write_bytes(signed)
        return f"{self.address}/{below}"


def _index(place: Path, name: str, packages: Packages) -> str:
    """Write an index and return the line of the release that describes it."""
    text = "\n".join(
        "".join(f"{field}: {value}\n" for field, value in package.items()) for package in packages
    )
    index = lzma.compress(text.encode())
    (place / name).parent.mkdir(parents=True, exist_ok=True)
    (place / name).write_bytes(index)
    return f" {hashlib.sha256(index).hexdigest()} {len(index)} {name}\n"


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    """An empty mirror whose key Capsule trusts; nothing else is asked."""
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "mirror"
    folder.mkdir()
    key = Tsk.generate("archive@mirror.example")
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_args: object) -> None:
            asked.append(self.path)

    handler = functools.partial(Handler, directory=folder)
    monkeypatch.setattr(indexes, "_keyring", lambda _: [key.extract_certificate()])
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Mirror(folder, f"http://127.0.0.1:{server.server_port}", key, asked)
        server.shutdown()
        thread.join()
