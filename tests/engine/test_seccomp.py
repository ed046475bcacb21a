"""The launcher in a hardened container, under the engine's own seccomp profile and under ours."""

import json
import shutil

import pytest

from capsule.image.seccomp import seccomp_option, seccomp_profile
from capsule.native import native_part

KEY = "ab" * 32
PRIVILEGES = "id -u; grep -E 'CapEff|NoNewPrivs' /proc/self/status"
# No pipelines: a signal of the first child could interrupt the shell's fork of the second one,
# which then fails (docs/launcher.md has this limitation).
DRAW = "for i in 1 2 3; do od -An -tx1 -N16 /dev/urandom; done; mktemp -u"
ADDRESSES = "cat /proc/self/personality; grep -E 'stack|heap|vdso' /proc/self/maps"


@pytest.fixture
def contain(engine, make_image, make_lock, make_task, cache, run_directory):
    """Return a function that launches a script in a container: status, output, failure."""
    engine.prepare(make_lock(), make_image(), cache, progress=lambda _: None)
    shutil.copy(native_part("capsule-launch"), run_directory)

    def run(script, *options, seccomp=True):
        folder = run_directory / f"launch-{len(list(run_directory.glob('launch-*')))}"
        folder.mkdir()
        settings = engine._settings(make_task(""), [])
        words = ["/out/capsule-launch", "--entropy", "virtual", "--key", KEY]
        words += ["--directory", f"/out/{folder.name}", *options, "--"]
        settings["entrypoint"] = [*words, "busybox", "sh", "-c", script]
        settings["security_opt"] = ["no-new-privileges"]
        settings["security_opt"] += [seccomp_option(engine.name)] if seccomp else []
        container = engine._start(settings, gpu=False)
        try:
            status = container.wait()["StatusCode"]
            return status, container.logs().decode(), folder
        finally:
            container.remove(force=True)

    return run


@pytest.mark.engine
def test_addresses_are_fixed_and_entropy_derived_without_any_privilege(contain):
    script = f"exec 2>&1; {PRIVILEGES}; {DRAW}; {ADDRESSES}; unshare -r true; chroot / true"
    (status, output, _), (_, again, _) = contain(script), contain(script)
    uid, capabilities, privileges, *lines = output.splitlines()
    assert int(uid) != 0
    assert (capabilities, privileges) == ("CapEff:\t0000000000000000", "NoNewPrivs:\t1")
    assert lines[4] == "00040000"
    assert "[stack]" in output
    assert output == again
    assert status != 0
    assert output.count("Operation not permitted") == 2


@pytest.mark.engine
def test_network_interfaces_are_listed_as_gloo_does_but_not_changed(contain):
    status, output, _ = contain("ip link && ip link set lo down")
    assert "lo: <LOOPBACK" in output
    assert status != 0
    assert "Operation not permitted" in output


@pytest.mark.engine
def test_the_engines_own_profile_lets_entropy_be_derived_but_addresses_not_fixed(contain):
    status, output, folder = contain("echo never printed", seccomp=False)
    assert status == 87
    assert output.startswith("capsule-launch: CAP-R105 ")
    assert "never" not in output
    failure = json.loads((folder / "launch-failure.json").read_text())
    assert failure["code"] == "CAP-R105"
    kept = [contain(DRAW, "--keep-address-randomization", seccomp=False)[:2] for _ in range(2)]
    assert kept[0] == kept[1]
    assert kept[0][0] == 0, kept[0][1]


def test_the_profile_allows_one_personality_more_than_the_default():
    rules = json.loads(seccomp_profile())["syscalls"]
    personalities = [rule["args"][0]["value"] for rule in rules if rule["names"] == ["personality"]]
    assert personalities == [0, 8, 0x20000, 0x20008, 0xFFFFFFFF, 0x40000]
    allowed = {
        name for rule in rules if rule["action"] == "SCMP_ACT_ALLOW" for name in rule["names"]
    }
    assert allowed.isdisjoint({"bpf", "io_uring_setup", "keyctl", "mount", "setns", "unshare"})


def test_podman_is_given_a_path():
    assert seccomp_option("podman").endswith("seccomp.json")
    assert json.loads(seccomp_option("docker").removeprefix("seccomp="))
