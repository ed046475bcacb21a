"""Rows on what surrounds the run: software, data sets, file systems, networks and machines."""

from dataclasses import replace

import pytest

from capsule.entropy.rows import surroundings as module
from capsule.experiment.contract import DataRead
from capsule.experiment.lock import LockedData
from tests.entropy.evidence import (
    TRAINER,
    assert_changed,
    changed_rows,
    evidence_of,
    judged,
    runtime,
    surroundings,
)

READ = DataRead(sets={"mnist": LockedData(sha256="0" * 64, files=2, size=9)})

# A run, the same with a mechanism broken or missing, and the rows that change; None: no such row.
BROKEN = {
    "data sets on read-only mounts": (
        TRAINER,
        replace(surroundings(data="read-only"), data=READ),
        {"Data sets": "eliminated"},
    ),
    "data sets that could be written": (
        TRAINER,
        replace(surroundings(data="writable"), data=READ),
        {"Data sets": "assumed"},
    ),
    "no container": (TRAINER, replace(TRAINER, image=None), {"Software": "assumed"}),
    "a way out": (TRAINER, surroundings(interfaces={"eth0": "everywhere"}), {"Network": "assumed"}),
    "a network of containers": (
        replace(TRAINER, engine={"name": "docker", "cluster": "docker:2"}),
        surroundings(
            replace(TRAINER, engine={"name": "docker", "cluster": "docker:2"}),
            interfaces={"eth0": "everywhere"},
        ),
        {"Network": "assumed"},
    ),
    "another machine after an interruption": (
        TRAINER,
        runtime(earlier_devices=({"kind": "cpu", "name": "Another CPU"},)),
        {"Change of machine": "assumed"},
    ),
}


@pytest.mark.parametrize(("whole", "broken", "changes"), BROKEN.values(), ids=BROKEN)
def test_a_broken_mechanism_changes_its_rows_and_no_others(whole, broken, changes):
    assert_changed(whole, broken, changes)


def test_every_row_is_broken_by_some_case():
    assert {source.name for source in module.SOURCES} - changed_rows(BROKEN) == {"File system"}


def test_file_systems_are_named_and_never_controlled():
    assert "run directory on ext4, temporary files on tmpfs" in evidence_of(TRAINER, "File system")
    unknown = surroundings(file_systems={})
    assert "could not determine" in evidence_of(unknown, "File system")
    assert judged(TRAINER)["File system"] == judged(unknown)["File system"] == "assumed"


def test_a_network_that_only_leads_to_the_runs_own_containers_is_no_way_out():
    cluster = replace(TRAINER, engine={"name": "docker", "cluster": "docker:2"})
    inside = surroundings(cluster, interfaces={"eth0": "neighbours"})
    assert judged(inside)["Network"] == "eliminated"
    remote = replace(inside, engine={"name": "docker", "cluster": "remote"})
    assert judged(remote)["Network"] == "assumed"


def test_every_interface_is_named_in_order():
    found = surroundings(interfaces={"wlan0": "everywhere", "eth0": "neighbours"})
    assert evidence_of(found, "Network") == (
        "the run saw other interfaces: eth0 (neighbours), wlan0 (everywhere)"
    )


def test_software_is_what_was_loaded_and_the_image_that_ran():
    assert evidence_of(TRAINER, "Software") == (
        f"loaded: python 3.11.2, torch 2.13.0, glibc 2.36; a container of the image "
        f"{TRAINER.image} ran"
    )
    bare = replace(runtime(libraries={"numpy": "2.0"}), image=None)
    assert evidence_of(bare, "Software") == (
        "loaded: glibc 2.36; no image was used, so the C library was the machine's"
    )


def test_data_sets_are_named_in_order_with_their_size():
    one = LockedData(sha256="1" * 64, files=1, size=1_000)
    read = DataRead(sets={"train": one, **READ.sets})
    text = evidence_of(replace(TRAINER, data=read), "Data sets")
    assert text.startswith("mnist (2 files, 9 bytes), train (1 file, 1,000 bytes): hashed before")


def test_data_that_no_mount_protects_may_have_changed_in_between():
    unknown = replace(surroundings(data=None), data=READ)
    assert judged(unknown)["Data sets"] == "assumed"
    assert "could write there" in evidence_of(unknown, "Data sets")


def test_earlier_machines_are_named_in_order():
    earlier = ({"name": "CPU A"}, {"kind": "cpu"})
    text = evidence_of(runtime(earlier_devices=earlier), "Change of machine")
    assert text == "the run began on CPU A, then unknown and was resumed on another machine"
