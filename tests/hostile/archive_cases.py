"""Archives that are not the canonical one, and what is no archive (cases 21 to 30)."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import zstandard

from capsule.bundle.archive import BLOCK, MAX_ARCHIVE, MAX_FILES, header
from capsule.experiment.canonical import sha256_hex
from capsule.image.archives.layers import TarEntry, tar_header
from tests.hostile.case import Case, Presented
from tests.hostile.document_cases import described
from tests.hostile.genuine import (
    BASE_LAYER,
    LOG,
    PROJECT_LAYER,
    RESULT,
    Files,
    documents,
    manifest_of,
    packed,
    program,
    relock,
    training,
    write_members,
)
from tests.hostile.presenting import changed, presented, rewritten

END = bytes(2 * BLOCK)


def start_of(data: bytes, name: str) -> int:
    """Return where the header of a member begins."""
    position = 0
    while data[position : position + BLOCK].split(b"\0", 1)[0] != name.encode():
        size = int(data[position + 124 : position + 135], 8)
        position += BLOCK + size + -size % BLOCK
    return position


def mended(block: bytes) -> bytes:
    """Return a header block with its checksum made right."""
    total = sum(block[:148]) + 8 * 32 + sum(block[156:])
    return block[:148] + b"%06o\0 " % total + block[156:]


def field(offset: int, value: bytes) -> Callable[[bytes], bytes]:
    """Overwrite bytes of a member's header, and mend its checksum."""

    def edit(data: bytes) -> bytes:
        start = start_of(data, LOG)
        block = data[start : start + BLOCK]
        block = mended(block[:offset] + value + block[offset + len(value) :])
        return data[:start] + block + data[start + BLOCK :]

    return edit


def before_log(blocks: bytes) -> Callable[[bytes], bytes]:
    def edit(data: bytes) -> bytes:
        start = start_of(data, LOG)
        return data[:start] + blocks + data[start:]

    return edit


def called(name: str) -> Callable[[bytes], bytes]:
    return field(0, name.encode().ljust(100, b"\0")[:100])


def member(name: str, data: bytes = b"?") -> bytes:
    return header(name, len(data)) + data + bytes(-len(data) % BLOCK)


def extended(**values: str) -> bytes:
    """Return a POSIX.1-2001 extended header with records."""
    info = tarfile.TarInfo("x")
    info.pax_headers = values
    return info.tobuf(tarfile.PAX_FORMAT)[:-BLOCK]


def global_header(**values: str) -> bytes:
    return tarfile.TarInfo.create_pax_global_header(values)


def long_name() -> bytes:
    info = tarfile.TarInfo("x" * 200)
    return info.tobuf(tarfile.GNU_FORMAT)[:-BLOCK]


def zipped() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as target:
        target.writestr("claims.json", b"{}")
    return stream.getvalue()


def without(name: str) -> Callable[[bytes], bytes]:
    def edit(data: bytes) -> bytes:
        start = start_of(data, name)
        size = int(data[start + 124 : start + 135], 8)
        return data[:start] + data[start + BLOCK + size + -size % BLOCK :]

    return edit


def padded_with(byte: bytes) -> Callable[[bytes], bytes]:
    def edit(data: bytes) -> bytes:
        end = start_of(data, LOG) + 2 * BLOCK
        return data[: end - 1] + byte + data[end:]

    return edit


SIZE_OF_LOG = len(training().files[LOG])
REWRITTEN = {
    # 21 and 22: members
    (21, "unlisted-member-at-the-end", "CAP-B109"): lambda d: d[:-1024] + member("x") + END,
    (21, "unlisted-member-between", "CAP-B107"): before_log(member("x")),
    (21, "listed-member-missing", "CAP-B107"): without(LOG),
    (21, "wrong-size", "CAP-B107"): field(124, b"%011o\0" % (SIZE_OF_LOG + 1)),
    (21, "other-content-of-the-same-size", "CAP-B108"): lambda d: d.replace(
        training().files[LOG], b"STARTED\n", 1
    ),
    (22, "member-twice", "CAP-B107"): before_log(member(LOG, training().files[LOG])),
    (22, "member-again-at-the-end", "CAP-B109"): lambda d: d[:-1024] + member(LOG, b"evil") + END,
    # 23: names
    **{
        (23, f"name-with-{what}", "CAP-B107"): called(name)
        for what, name in {
            "parent-folder": "../output.log",
            "root": "/run/output.log",
            "dot": "./run/output.log",
            "empty-component": "run//output.log",
            "backslash": "run\\output.log",
            "drive-letter": "C:/output.log",
            "leading-dash": "-rf/output.log",
            "leading-dot": ".run/output.log",
            "tail-behind-nul": LOG + "\0evil",
            "a-hundred-bytes-and-more": "run/" + "x" * 96,
            "escape-sequence": "run/\x1b[2Joutput.log",
            "right-to-left-override": "run/\u202egol.log",
        }.items()
    },
    (23, "name-split-into-prefix-and-name", "CAP-B107"): lambda d: called("output.log")(
        field(345, b"run")(d)
    ),
    # 24: kinds of file
    **{
        (24, what, "CAP-B107"): field(156, kind)
        for what, kind in {
            "hard-link": b"1",
            "symbolic-link": b"2",
            "character-device": b"3",
            "block-device": b"4",
            "directory": b"5",
            "fifo": b"6",
            "contiguous-file": b"7",
            "sparse-file": b"S",
            "kind-of-old-archives": b"\0",
            "kind-that-does-not-exist": b"?",
        }.items()
    },
    (24, "link-name-of-a-plain-file", "CAP-B107"): field(157, b"/etc/passwd"),
    # 25: extensions
    **{
        (25, f"extended-{name}", "CAP-B107"): before_log(extended(**{name: value}))
        for name, value in {
            "path": "evil",
            "size": "0",
            "linkpath": "/etc/passwd",
            "comment": "hello",
        }.items()
    },
    (25, "global-extended-path", "CAP-B107"): before_log(global_header(path="evil")),
    (25, "long-name-of-gnu", "CAP-B107"): before_log(long_name()),
    (25, "size-in-base-256", "CAP-B107"): field(124, b"\x80" + struct.pack(">xxxQ", SIZE_OF_LOG)),
    # 26: metadata and slack
    **{
        (26, what, "CAP-B107"): field(offset, value)
        for what, offset, value in [
            ("set-user-id", 100, b"0004644\0"),
            ("owner", 108, b"0001750\0"),
            ("group", 116, b"0001750\0"),
            ("date", 136, b"14000000000\0"),
            ("owner-by-name", 265, b"root"),
            ("group-by-name", 297, b"root"),
            ("device-number", 329, b"0000001\0"),
            ("bytes-behind-the-header", 500, b"hidden"),
        ]
    },
    (26, "bytes-in-the-padding", "CAP-B106"): padded_with(b"!"),
    # 27: ends
    (27, "empty-file", "CAP-B104"): lambda _: b"",
    (27, "cut-in-a-header", "CAP-B104"): lambda d: d[: start_of(d, LOG) + 100],
    (27, "cut-in-content", "CAP-B104"): lambda d: d[: start_of(d, LOG) + BLOCK + 3],
    (27, "cut-before-the-end", "CAP-B104"): lambda d: d[:-1024],
    (27, "cut-within-the-end", "CAP-B104"): lambda d: d[:-512],
    (27, "end-in-the-middle", "CAP-B104"): before_log(END),
    (27, "one-byte-behind-the-end", "CAP-B109"): lambda d: d + b"\0",
    (27, "filled-up-to-a-record", "CAP-B109"): lambda d: d + bytes(-len(d) % 10240 or 10240),
    (27, "two-archives", "CAP-B109"): lambda d: d + d,
    (27, "corrupt-header-in-the-middle", "CAP-B107"): lambda d: d.replace(
        b"ustar\x0000", b"xstar\x0000", 9
    ).replace(b"xstar\x0000", b"ustar\x0000", 8),
    # 29 and 30: other formats
    (29, "wrapped-in-gzip", "CAP-B103"): lambda d: gzip.compress(d, mtime=0),
    (29, "wrapped-in-bzip2", "CAP-B103"): bz2.compress,
    (29, "wrapped-in-xz", "CAP-B103"): lzma.compress,
    (29, "wrapped-in-zstd", "CAP-B103"): zstandard.compress,
    (30, "zip", "CAP-B103"): lambda _: zipped(),
    (30, "zip-behind-the-archive", "CAP-B109"): lambda d: d + zipped(),
    (30, "zip-before-the-archive", "CAP-B103"): lambda d: zipped() + d,
    # Noise that does not begin as a bundle does is no bundle (CAP-B114).
    (30, "noise", "CAP-B107"): lambda _: b"signatures/run.sigstore.json".ljust(4096, b"\xff"),
}


def swapped_roles(manifest: dict) -> None:
    """Give the bytes of the log to the result, and the other way round, under valid digests."""
    by_path = {file["path"]: file for file in manifest["files"]}
    for fact in ("sha256", "size"):
        one, other = by_path[LOG], by_path[RESULT]
        one[fact], other[fact] = other[fact], one[fact]


def listed(path: str) -> Callable[[dict], None]:
    """List the log under another name."""

    def edit(manifest: dict) -> None:
        file = next(file for file in manifest["files"] if file["path"] == LOG)
        manifest["files"] = sorted(
            [*manifest["files"], {**file, "path": path}], key=lambda file: file["path"]
        )

    return edit


COLLISIONS = {
    "names-equal-but-for-case": "run/Output.log",
    "file-that-is-also-a-folder": "run",
    "letters-composed": "run/\u00e9.log",
    "letters-decomposed": "run/e\u0301.log",
    "letters-of-another-width": "run/\uff4futput.log",
    "letters-of-another-script": "run/\u043eutput.log",
    "invisible-letter": "run/out\u200bput.log",
    "reading-order-reversed": "run/\u202etuptuo.log",
    "reserved-name": "signatures/other.json",
    "name-of-the-manifest": "Manifest.json",
}


def of_many_files(folder: Path, hostile: bool) -> Presented:
    """Present one file more than a reader takes, or only those of the run."""
    run = training()
    spare = MAX_FILES - len(run.files) + 1 if hostile else 0
    names = [f"workspace/{number:05d}" for number in range(spare)]
    manifest = manifest_of(run)
    template = {"size": 0, "sha256": sha256_hex(b""), "role": "output", "mediaType": "a/b"}
    manifest["files"] += [{**template, "path": name} for name in names]
    members = documents(manifest) | dict(run.files) | dict.fromkeys(names, b"")
    return presented(folder, lambda path: write_members(path, members))


def of_a_sparse_file(folder: Path, hostile: bool) -> Presented:
    """Present an archive with a hole behind it that would take hours to read."""
    shown = presented(folder, lambda path: packed(training(), path))
    if hostile:
        os.truncate(shown.bundle, MAX_ARCHIVE + 1)
    return shown


def of_a_pipe(folder: Path, hostile: bool) -> Presented:
    """Present a pipe that nobody writes to: opening it would wait for ever."""
    shown = presented(folder, lambda path: packed(training(), path))
    if hostile:
        shown.bundle.unlink()
        os.mkfifo(shown.bundle)
    return shown


def of_a_folder(folder: Path, hostile: bool) -> Presented:
    shown = presented(folder, lambda path: packed(training(), path))
    if hostile:
        shown.bundle.unlink()
        shown.bundle.mkdir()
    return shown


# Bombs within


def zeros(size: int, window_log: int = 20) -> bytes:
    """Return ``size`` zeros as one frame that does not say how many it holds."""
    parameters = zstandard.ZstdCompressionParameters.from_level(
        3, window_log=window_log, write_content_size=False
    )
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    block = bytes(1 << 20)
    pieces = [compressor.compress(block) for _ in range(size >> 20)]
    return b"".join([*pieces, compressor.flush()])


def claimed_size(size: int) -> Callable[[Files], None]:
    """Have the lock, and whatever else must agree with it, say that the source tree is so large."""

    def change(files: Files) -> None:
        relock(files, lambda lock: lock["project"].update(size=size))
        manifest = json.loads(files["image/manifest.json"])
        manifest["layers"][-1]["size"] = size
        files["image/manifest.json"] = json.dumps(
            manifest, sort_keys=True, separators=(",", ":")
        ).encode()

    return change


def bomb(files: Files) -> None:
    files[PROJECT_LAYER] = zeros(1 << 30)


def claimed_bomb(files: Files) -> None:
    claimed_size(1 << 30)(files)
    bomb(files)


def layer_of(*entries: TarEntry) -> Callable[[Files], None]:
    """Put a source tree of these headers into the bundle, whose size the lock states."""
    body = b"".join(map(tar_header, entries)) + bytes(1024)

    def change(files: Files) -> None:
        claimed_size(len(body))(files)
        files[PROJECT_LAYER] = zstandard.compress(body)

    return change


BOMBS = {
    "file-larger-than-any-disk": layer_of(
        TarEntry("project", "", "directory"), TarEntry("project/a", "", "file", size=10**30)
    ),
    "deep-paths-without-their-folders": layer_of(
        TarEntry("project", "", "directory"),
        *(TarEntry(f"project/{n}/{'a/' * 2000}b", "", "file", 0o644) for n in range(9)),
    ),
    "bomb-in-a-layer": bomb,
    "bomb-in-a-layer-whose-size-is-claimed": claimed_bomb,
    "layer-of-ten-gigabytes": claimed_size(10 << 30),
    "window-of-a-gigabyte": lambda files: files.update({PROJECT_LAYER: zeros(1 << 20, 27)}),
    "layer-cut-off": lambda files: files.update({PROJECT_LAYER: files[PROJECT_LAYER][:-3]}),
    "layer-that-goes-on": lambda files: files.update(
        {PROJECT_LAYER: files[PROJECT_LAYER] + zstandard.compress(b"more")}
    ),
    "layer-that-is-not-compressed": lambda files: files.update({PROJECT_LAYER: bytes(1024)}),
}

CASES = [
    *(rewritten(*facts, edit) for facts, edit in REWRITTEN.items()),
    described(swapped_roles, 21, "contents-swapped-between-names", "CAP-B107"),
    *(described(listed(path), 28, name, "CAP-B111") for name, path in COLLISIONS.items()),
    *(changed(29, name, "CAP-V004", change, program) for name, change in BOMBS.items()),
    changed(
        33,
        "layer-of-something-else",
        "CAP-V004",
        lambda files: files.update({PROJECT_LAYER: files[BASE_LAYER]}),
        program,
    ),
    Case(29, "more-files-than-a-reader-takes", "CAP-B105", of_many_files),
    Case(29, "sixteen-gigabytes-of-nothing", "CAP-B105", of_a_sparse_file),
    Case(30, "pipe", "CAP-B102", of_a_pipe),
    Case(30, "folder", "CAP-B101", of_a_folder),
]
