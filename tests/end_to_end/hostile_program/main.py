# ruff: noqa: T201 -- output is what this is about
"""A stranger's program: what it does is chosen by its seed, so that one image serves all."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import attempts


def tell(message):
    """Append an event to those that Capsule shows."""
    event = {"time": 0.0, "kind": "evaluation", "step": 1, "total_steps": 2, "message": message}
    with Path("/out/events.jsonl").open("a") as events:
        events.write(json.dumps(event) + "\n")


def fill_processes_and_log():
    """Fork until refused, then print without end, deaf to the order to stop."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    children = 0
    while True:
        try:
            child = os.fork()
        except OSError:
            break
        if child == 0:
            time.sleep(600)
        children += 1
    Path("children").write_text(str(children))
    tell("flooding")
    while True:
        os.write(2, b"\x1b[2J\x1b]0;owned\x07" + b"x" * 65_000)


def fill_disk():
    number = 0
    while True:
        Path(f"file-{number}").write_bytes(b"x" * (1 << 22))
        number += 1


def fill_memory():
    kept = []
    while True:
        kept.append(b"x" * (1 << 24))


def dig():
    """Make folders deeper than any path can say."""
    name = "d" * 200
    for _ in range(300):
        Path(name).mkdir()
        os.chdir(name)


def litter():
    for number in range(3000):
        os.close(os.open(f"f{number}", os.O_CREAT | os.O_WRONLY))


def leave_a_pipe():
    os.mkfifo("/out/entropy.profile")


def leave_oddities():
    """Leave what is allowed, but not what anybody expects, in the working folder and beside it."""
    Path("absolute").symlink_to("/etc/shadow")
    Path("relative").symlink_to("../../../../../../etc/shadow")
    Path("loop").symlink_to("loop")
    os.mkfifo("pipe")
    socket.socket(socket.AF_UNIX).bind("socket")
    Path("file").write_text("one file, two names")
    os.link("file", "hard-link")
    Path("\x1b[31mred\x1b[0m [bold]\u202ename\u2066\n").write_text("odd")
    Path("-rf").write_text("odd")
    Path("a" * 200).write_text("odd")
    deep = Path(*["deep"] * 40)
    deep.mkdir(parents=True)
    (deep / "file").write_text("odd")
    Path("set-user-id").write_bytes(b"#!/bin/sh\n")
    Path("set-user-id").chmod(0o6755)
    Path("/out").chmod(0o777)
    for _ in range(2000):
        tell("\x1b[2J[link=file:///]click[/]\u202e[/]")
    print("\x1b]0;owned\x07 \x9b31m \u202e [red]printed[/red]")
    time.sleep(1)


def kill_everything():
    os.kill(-1, 9)


DEEDS = {
    0: attempts.main,
    1: fill_processes_and_log,
    2: fill_disk,
    3: fill_memory,
    4: dig,
    5: litter,
    6: leave_a_pipe,
    7: leave_oddities,
    8: kill_everything,
}

if __name__ == "__main__":
    DEEDS[int(sys.argv[1])]()
