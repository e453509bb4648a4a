"""Runs inside the grading container: a test script, and signed words on how it ended and what reward it left.

    LEGORL_REPORT_FD=3 LEGORL_REPORT_KEY=... python3 -s -B script_report.py '{"root", "command", "reward_file", ...}'

The script and the code under test are other processes than this one, which they cannot look into. When the script has
ended, whatever it or the code under test left running is counted, killed, and only then the reward is read: from
`reward_file` with the suffix .json (numbers by name), else .txt (one number), as Harbor reads them.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

from guarded import KEY_BYTES, kill_others, make_sender, take_keys

REWARD_LIMIT = 64 << 10


def others_alive() -> int:
    """How many processes of this user live beside this one; those that only wait for their parent do not."""
    count = 0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            facts = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
        except OSError:  # ended meanwhile
            continue
        count += facts["Uid"].split()[0] == str(os.getuid()) and "Z" not in facts["State"].split()[0]
    return count


def read_reward(place: str) -> dict:
    """The reward that lies at `place`, or why it does not count: {"reward"} or {"fault"}."""
    for suffix, read in ((".json", from_json), (".txt", from_text)):
        path = Path(place + suffix)
        if not path.is_symlink() and not path.exists():
            continue
        if (
            path.is_symlink()
            or not path.is_file()
            or not os.access(path, os.W_OK)
            or not os.access(path.parent, os.W_OK)
        ):
            return {"fault": f"{path.name} was locked or replaced"}
        if path.stat().st_size > REWARD_LIMIT:
            return {"fault": f"{path.name} is too long"}
        try:
            value = read(path.read_text())
        except (ValueError, TypeError) as error:
            return {"fault": f"{path.name}: {error}"}
        if not math.isfinite(value):
            return {"fault": f"{path.name}: not a finite number"}
        return {"reward": value}
    return {"fault": "no reward file"}


def from_text(text) -> float:
    return float(text.strip())


def from_json(text) -> float:
    """The number called reward, or the only one there is."""
    table = json.loads(text)
    if not isinstance(table, dict) or not table:
        raise ValueError("no numbers by name")
    if any(isinstance(value, bool) or not isinstance(value, (int, float)) for value in table.values()):
        raise ValueError("a value is not a number")
    if "reward" not in table and len(table) > 1:
        raise ValueError("several numbers, and none is called reward")
    return float(table.get("reward", next(iter(table.values()))))


def main() -> None:
    keys, report, settings = take_keys()
    os.lseek(keys, -KEY_BYTES, os.SEEK_END)
    send = make_sender(report, os.read(keys, KEY_BYTES))
    os.close(keys)
    place = settings["reward_file"]
    if place:
        Path(place).parent.resolve().mkdir(parents=True, exist_ok=True)  # its top folder is a link
    status = subprocess.run(settings["command"], cwd=settings["root"], check=False).returncode
    left = others_alive()
    kill_others()
    send(event="script", status=status, left=left, **(read_reward(place) if place else {}))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
