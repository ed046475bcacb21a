"""Rows on what surrounds the run: software, network, machines."""

from __future__ import annotations

from capsule.entropy.evidence import Evidence, Judgement, LedgerSource
from capsule.host.wording import counted

_SHOWN_LIBRARIES = ("python", "torch")


def _software(evidence: Evidence) -> Judgement:
    libraries = evidence.runtime.libraries
    loaded = [f"{name} {libraries[name]}" for name in _SHOWN_LIBRARIES if name in libraries]
    text = ", ".join([*loaded, evidence.mechanisms.surroundings.c_library])
    if evidence.image is None:
        return "assumed", f"loaded: {text}; no image was used, so the C library was the machine's"
    return "eliminated", f"loaded: {text}; a container of the image {evidence.image} ran"


def _data(evidence: Evidence) -> Judgement:
    if evidence.data is None:
        return None
    sets = [
        f"{name} ({counted(pin.files, 'file')}, {counted(pin.size, 'byte')})"
        for name, pin in sorted(evidence.data.sets.items())
    ]
    hashed = f"{', '.join(sets)}: hashed before the run and after it"
    if evidence.mechanisms.surroundings.data == "read-only":
        return "eliminated", f"{hashed}; the run saw only read-only mounts of data"
    return "assumed", f"{hashed}; in between, the run or another program could write there"


def _network(evidence: Evidence) -> Judgement:
    interfaces = evidence.mechanisms.surroundings.interfaces
    if not interfaces:
        return "eliminated", "the run saw only its own loopback interface"
    shown = ", ".join(f"{name} ({reach})" for name, reach in sorted(interfaces.items()))
    outside = "everywhere" in interfaces.values()
    # The containers of a cluster have a network of their own. The reach of each interface was read
    # back inside the run.
    if evidence.engine.get("cluster", "").startswith("docker:") and not outside:
        return "eliminated", f"the run saw only the network of its own containers: {shown}"
    return "assumed", f"the run saw other interfaces: {shown}"


def _machines(evidence: Evidence) -> Judgement:
    earlier = evidence.runtime.earlier_devices
    if not earlier:
        return None
    names = [str(device.get("name", "unknown")) for device in earlier]
    return "assumed", f"the run began on {', then '.join(names)} and was resumed on another machine"


def _file_systems(evidence: Evidence) -> Judgement:
    found = evidence.mechanisms.surroundings.file_systems
    if not found:
        return "assumed", "the run could not determine them"
    shown = ", ".join(f"{name} on {kind}" for name, kind in sorted(found.items()))
    return "assumed", f"{shown}: folder sizes, inode numbers and file times depend on it"


SOURCES = (
    LedgerSource("Software", _software, "code that is downloaded at run time"),
    LedgerSource("Data sets", _data, "another program that changes a file and changes it back"),
    LedgerSource("File system", _file_systems, "a program that reads more of a file than it wrote"),
    LedgerSource(
        "Network",
        _network,
        "port numbers and names of abstract sockets that the kernel chooses",
    ),
    LedgerSource("Change of machine", _machines, "different arithmetic on the two machines"),
)
