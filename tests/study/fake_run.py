"""Takes the place of 'capsule run': ends as the file 'plan' beside the members' folders says.

It is started as ``python -m capsule run --resume FOLDER ...``, and reads one word for the member.
"""

import json
import signal
import sys
import time
from pathlib import Path

CLAIM = "a" * 64


def interrupted(*_):
    (folder / "interrupted").touch()
    sys.exit(130)


assert sys.argv[1:5] == ["-m", "capsule", "run", "--resume"]
folder = Path(sys.argv[5])
(folder / "arguments").write_text(json.dumps(sys.argv[6:]))
plan = json.loads((folder.parent / "plan").read_text()).get(folder.name, "done")
if plan == "wait":
    signal.signal(signal.SIGINT, interrupted)
    (folder / "work").mkdir()
    (folder / "work" / "events.jsonl").write_text(
        '{"kind":"progress","step":256,"steps_per_second":64.0,"time":1.0,"total_steps":1024}\n'
    )
    (folder / "began").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
if plan == "refused":
    sys.stdout.write(
        json.dumps({"code": "CAP-E007", "message": "out of memory", "fix": "Buy more."})
    )
    sys.exit(6)
if plan == "silent":
    sys.stderr.write("Killed\n")
    sys.exit(1)
if plan == "list":
    sys.stdout.write("[]")
    sys.exit(1)
if plan == "killed":
    signal.raise_signal(signal.SIGKILL)
(folder / "x.capsule.tar").touch()
sys.stdout.write(json.dumps({"bundle": str(folder / "x.capsule.tar"), "claim_id": CLAIM}))
