"""What each parser promises for any bytes, and bytes to begin with.

A parser raises :class:`CapsuleError`, or returns a value that is written as the very bytes it was
read from. Any other exception, and any other writing, is a finding.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))

from cryptography.hazmat.primitives.asymmetric import ec
from hostile import genuine
from study.studies import make_results

from capsule.bundle import envelope, run_bundle, sshsig
from capsule.bundle.allowed_signers import parse_allowed_signers
from capsule.bundle.bundle import open_bundle
from capsule.bundle.claims import Observations, ProgramClaims, TrainingClaims
from capsule.bundle.keys import PrivateKey
from capsule.bundle.manifest import ENVELOPE, MANIFEST, Manifest, parse_document
from capsule.bundle.sbom_checks import validate_sbom
from capsule.bundle.trust import TrustPolicy
from capsule.entropy import profile
from capsule.experiment import contract, trace
from capsule.experiment.arrival_log import parse_arrivals
from capsule.experiment.canonical import canonical_json, parse_canonical_json, sha256_hex
from capsule.experiment.errors import CapsuleError
from capsule.experiment.fields import Model
from capsule.experiment.lock import Lock
from capsule.experiment.schedule_log import ScheduleLog, parse_schedule
from capsule.host.spec_file import parse_spec
from capsule.host.validation import validate
from capsule.host.yaml_document import YamlDocument
from capsule.image.archives.layer_reader import read_layer
from capsule.image.archives.layers import file_entry, padded, tar_header, write_tar
from capsule.study.directory import Outcome
from capsule.study.lock import StudyLock
from capsule.study.spec import StudySpec
from capsule.study.study_bundle import open_study, pack_study
from capsule.study.tables import StudyClaims, tables_of
from capsule.verification.integrity.tensors import digests_of


class FindingError(Exception):
    """A parser took bytes that it would not write."""


@dataclass(frozen=True)
class Parser:
    """A parser under test.

    Attributes:
        check: Parses bytes; lets nothing but a finding, or an exception that is one, through.
        seeds: What it accepts, to begin with.
    """

    check: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]


def _same(written: object, read: object) -> None:
    if written != read:
        raise FindingError(f"read {read!r:.300}, would write {written!r:.300}")


def _in_memory(data: bytes) -> int:
    """Return the descriptor of a regular file that holds the data and has no name."""
    descriptor = os.memfd_create("fuzz")
    os.write(descriptor, data)
    return descriptor


def _bundle(data: bytes) -> None:
    descriptor = _in_memory(data)
    try:
        with open_bundle(Path(f"/proc/self/fd/{descriptor}"), [genuine.SIGNER.public]) as bundle:
            _same(bundle.claim_id, sha256_hex(genuine.training().files[run_bundle.CLAIMS]))
    finally:
        os.close(descriptor)


def _trace(data: bytes) -> None:
    with NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        records = list(trace.read_trace(Path(file.name)))
    head = trace.GENESIS
    lines = (line for line in data.split(b"\n")[:-1] if "records" not in json.loads(line))
    for record, line in zip(records, lines, strict=True):
        head = trace.extend(head, line)
        _same((record.step, record.head), (json.loads(line)["step"], head.hex()))


def _document(model: type[Model]) -> Callable[[bytes], None]:
    def check(data: bytes) -> None:
        document = parse_document(data, model, "document", "CAP-B144")
        written = document.document()
        _same(parse_document(written, model, "document", "CAP-B144"), document)

    return check


def _canonical(data: bytes) -> None:
    try:
        value = parse_canonical_json(data)
    except ValueError:  # what callers turn into errors of theirs
        return
    _same(canonical_json(value), data)


def _envelope(data: bytes) -> None:
    _, signature = envelope.examine(data, [genuine.SIGNER.public])
    claimed = json.loads(data)["verificationMaterial"]["publicKey"]["hint"]
    _same(signature.fingerprint, claimed)
    if signature.key is not None:  # nobody here can sign anything else
        _same(data, _documents()[ENVELOPE])


def _ssh_signature(data: bytes) -> None:
    sshsig.verify(data, _MESSAGE)
    if data not in _ssh_signatures():  # nobody here can sign anything else
        raise FindingError(f"took {data!r:.300}")


def _trust_file(data: bytes) -> None:
    try:
        text = data.decode()
        signers = parse_allowed_signers(text)
    except ValueError:  # what callers turn into errors of theirs
        return
    for signer in signers:
        if signer.principals not in text or signer.key.openssh().split()[1] not in text:
            raise FindingError(f"read {signer!r:.300}")


def _manifest(data: bytes) -> None:
    manifest = parse_document(data, Manifest, MANIFEST, "CAP-B111")
    if b'"schema"' in data and b'"signatures"' in data:
        _same(manifest.document(), data)


def _profile(data: bytes) -> None:
    """Take the data for a profile without its checksum, which only stands in the way."""
    whole = data + hashlib.blake2s(data).digest()
    _same(profile.serialize(profile.parse(whole)), whole)


def _schedule(data: bytes) -> None:
    """Take the data for a header line and planes that are neither compressed nor summed up yet."""
    line, feed, planes = data.partition(b"\n")
    try:
        header = json.loads(line)
        blank = canonical_json({**header, "content": "0" * 64}) + feed
        content = sha256_hex(blank + planes)
        line = canonical_json({**header, "content": content})
    except (ValueError, TypeError, RecursionError):
        pass
    log = parse_schedule(line + feed + zlib.compress(planes))
    _same(parse_schedule(log.document()), log)


def _arrivals(data: bytes) -> None:
    _same(parse_arrivals(data).document(), data)


def _tensors(data: bytes) -> None:
    digests = digests_of(io.BytesIO(data), len(data), "tensors")
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    _same(set(digests), set(header) - {"__metadata__"})


def _spec(data: bytes) -> None:
    spec = parse_spec(data, "spec")
    written = spec.document()
    _same(parse_spec(written, "spec"), spec)


def _study(data: bytes) -> None:
    study = validate(YamlDocument(data, "study.yaml", "study"), StudySpec)
    written = study.document()
    _same(validate(YamlDocument(written, "study.yaml", "study"), StudySpec), study)


def _study_bundle(data: bytes) -> None:
    descriptor = _in_memory(data)
    try:
        path = Path(f"/proc/self/fd/{descriptor}")
        with open_study(path, TrustPolicy.of([genuine.SIGNER.public])) as (_, study):
            _same(study.claims.tables, tables_of(study.results))
    finally:
        os.close(descriptor)


def _layer(data: bytes) -> None:
    written = b"".join(
        tar_header(entry) + padded(b"".join(entry.content()))
        for entry in read_layer(io.BytesIO(data), "layer")
    )
    _same(written + bytes(1024), data)


def _documents() -> genuine.Files:
    run = genuine.training()
    return genuine.documents(genuine.manifest_of(run))


def _file(*names: str, run: Callable[[], genuine.Run] = genuine.training) -> list[bytes]:
    return [run().files[name] for name in names]


def _packed() -> list[bytes]:
    with TemporaryDirectory() as folder:
        return [genuine.packed(genuine.training(), Path(folder, "b")).read_bytes()]


def _traces() -> list[bytes]:
    lines, head = [], trace.GENESIS
    for step in range(trace.SEGMENT_RECORDS):
        lines.append(b'{"step":%d}' % (step + 1))
        head = trace.extend(head, lines[-1])
    lines += [trace.segment_line(head, len(lines)), b'{"step":9999,"loss":{"last":null}}']
    return [*_file(genuine.TRACE), b"".join(line + b"\n" for line in lines)]


def _schedules() -> list[bytes]:
    from array import array

    log = ScheduleLog("0" * 64, 2, 2, array("H", [0, 1, 1, 0]), array("H", [0, 0, 1, 0]))
    line, _, compressed = log.document().partition(b"\n")
    return [line + b"\n" + zlib.decompress(compressed)]


def _specs() -> list[bytes]:
    spec = json.loads(_file(run_bundle.LOCK)[0])["spec"]
    ready = Path(__file__).parents[2] / "specs"
    return [canonical_json(spec), *(path.read_bytes() for path in sorted(ready.glob("*.yaml")))]


def _studies() -> list[bytes]:
    ready = Path(__file__).parents[2] / "specs" / "studies"
    return [path.read_bytes() for path in sorted(ready.glob("*.yaml"))]


def _study_claims() -> list[bytes]:
    results = make_results()
    members = tuple(member.identity for member in results.members)
    claims = StudyClaims(lock=results.lock.digest(), members=members, tables=tables_of(results))
    return [claims.document()]


def _study_bundles() -> list[bytes]:
    with TemporaryDirectory() as folder:
        return [pack_study(make_results(), genuine.SIGNER, Path(folder))[0].read_bytes()]


def _outcomes() -> list[bytes]:
    done = Outcome(bundle="a.capsule.tar", claim_id="0" * 64)
    return [done.document(), Outcome(code="CAP-E007", message="memory", fix="Wait.").document()]


_MESSAGE = b"message"


def _ssh_signatures() -> list[bytes]:
    keys = (genuine.SIGNER, PrivateKey(ec.derive_private_key(7, ec.SECP256R1())))
    return [sshsig.sign(_MESSAGE, key) for key in keys]


def _trust_files() -> list[bytes]:
    key = genuine.SIGNER.public.openssh()
    options = r'namespaces="git,\"x",valid-after="20200101",valid-before="203001011200Z"'
    return [f'# all\n*@lab,!bob@lab {key}\n"alice x" {options} {key}'.encode()]


def _layers() -> list[bytes]:
    buffer = io.BytesIO()
    entries = [file_entry("a/b", "seed", b"c"), file_entry("a/" + "d" * 120, "seed", b"")]
    write_tar(entries, buffer.write)
    return [buffer.getvalue()]


PARSERS: Mapping[str, Parser] = {
    "bundle": Parser(_bundle, _packed),
    "envelope": Parser(_envelope, lambda: [_documents()[ENVELOPE]]),
    "ssh-signature": Parser(_ssh_signature, _ssh_signatures),
    "trust-file": Parser(_trust_file, _trust_files),
    "manifest": Parser(_manifest, lambda: [_documents()[MANIFEST]]),
    "canonical": Parser(_canonical, lambda: _file(run_bundle.CLAIMS, run_bundle.LEDGER)),
    "lock": Parser(_document(Lock), lambda: _file(run_bundle.LOCK)),
    "claims": Parser(_document(TrainingClaims), lambda: _file(run_bundle.CLAIMS)),
    "program-claims": Parser(
        _document(ProgramClaims), lambda: _file(run_bundle.CLAIMS, run=genuine.program)
    ),
    "observations": Parser(_document(Observations), lambda: _file(run_bundle.OBSERVATIONS)),
    "streams": Parser(_document(contract.StreamProfiles), lambda: _file(run_bundle.STREAMS)),
    "sbom": Parser(validate_sbom, lambda: _file(run_bundle.IMAGE_SBOM)),
    "trace": Parser(_trace, _traces),
    "schedule": Parser(_schedule, _schedules),
    "arrivals": Parser(_arrivals, lambda: _file(run_bundle.ARRIVALS, run=genuine.program)),
    "profile": Parser(
        _profile, lambda: [_file(run_bundle.ENTROPY_PROFILE, run=genuine.program)[0][:-32]]
    ),
    "tensors": Parser(_tensors, lambda: _file(genuine.FINAL)),
    "spec": Parser(_spec, _specs),
    "study": Parser(_study, _studies),
    "study-lock": Parser(_document(StudyLock), lambda: [make_results().lock.document()]),
    "study-claims": Parser(_document(StudyClaims), _study_claims),
    "study-bundle": Parser(_study_bundle, _study_bundles),
    "member-outcome": Parser(_document(Outcome), _outcomes),
    "layer": Parser(_layer, _layers),
}


def check(name: str, data: bytes) -> bool:
    """Give bytes to a parser; tell whether it took them.

    Raises:
        FindingError: It took what it would not write.
        Exception: It broke.
    """
    try:
        PARSERS[name].check(data)
    except CapsuleError:
        return False
    return True
