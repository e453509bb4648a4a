"""How fast sandboxes are and what they leave behind: `make bench-sandbox`, or `tests/bench/sandbox.py [PART]...`.

containers  hardened containers a second at 8 in parallel (start, run `true`, remove), rounds alternating with as many
            of `podman run --rm ... true`, the least that Podman can do on this machine at this minute.
diff        seconds to put a repository of 50 MB into a sandbox, to commit it, and to collect a patch from it.
grading     seconds that grading one attempt takes beyond the test command itself, rounds alternating between the two;
            and what the whole command takes for a single attempt.
leftovers   COUNT attempts of lego-rollout with a tiny harness and the script engine, and grades of ten more:
            containers, layers, mounts, cgroups, processes, sockets and files that came and did not go, and disk.

ROUNDS and COUNT in the environment change how much is done, MODEL the model folder whose tokenizer serves. JSON on
stdout, medians over rounds; words on stderr. Exit 4 where a bound does not hold.
"""

import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from builders import shard, small_task
from grading import attempt, make_patch
from leftovers import watching

from legorl import paths
from legorl.sandbox import BASE_IMAGE, Spec, ensure_ready, open_sandbox
from legorl.sandbox.podman import podman
from legorl.shards import open_shard
from legorl.task import REPO, TEST_ENVIRONMENT, Limits, load_task, pack

ROUNDS = int(os.environ.get("ROUNDS", "5"))
COUNT = int(os.environ.get("COUNT", "500"))
MODEL = Path(os.environ.get("MODEL") or paths.cache_dir() / "models" / "SmolLM2-135M-Instruct")
PARALLEL = 8
BIN = Path(__file__).parents[2] / "bin"
BOUNDS = {"containers_per_s": 2.0, "diff_s": 0.3, "grading_overhead_s": 1.5, "left": 0, "disk_bytes": 1 << 20}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- containers --------------------------------------------------------------------------------------------------------


async def hardened(number: int) -> None:
    async with open_sandbox(Spec(f"bench-{number}", "bench", Limits())) as box:
        assert (await box.run(["true"])).exit_code == 0


async def bare(_number: int) -> None:
    await podman("run", "--rm", "--pull=never", "--network", "none", "--log-driver", "none", BASE_IMAGE, "true")


async def per_second(work: Callable[[int], Awaitable[None]], count: int) -> float:
    """How many times a second `work` is done, PARALLEL at a time."""
    free = asyncio.Semaphore(PARALLEL)

    async def one(number: int) -> None:
        async with free:
            await work(number)

    begun = time.perf_counter()
    await asyncio.gather(*map(one, range(count)))
    return count / (time.perf_counter() - begun)


async def containers(count: int = 4 * PARALLEL) -> dict[str, Any]:
    await per_second(hardened, PARALLEL)  # warm up
    speeds: dict[str, list[float]] = {"hardened": [], "bare": []}
    for k in range(ROUNDS):
        for name, work in (("hardened", hardened), ("bare", bare))[:: 1 if k % 2 else -1]:
            speeds[name].append(await per_second(work, count))
        say("containers a second: " + ", ".join(f"{speed[-1]:.2f} {name}" for name, speed in speeds.items()))
    ratios = [a / b for a, b in zip(speeds["hardened"], speeds["bare"], strict=True)]
    out = {
        "containers_per_s": statistics.median(speeds["hardened"]),
        "bare_podman_per_s": statistics.median(speeds["bare"]),
        "ratio_to_bare_podman": statistics.median(ratios),
        "rounds": speeds["hardened"],
    }
    return out | {"holds": out["containers_per_s"] >= BOUNDS["containers_per_s"]}


# -- diff --------------------------------------------------------------------------------------------------------------


def large_repository(folder: Path, size: int = 50 << 20, files: int = 2000) -> None:
    """Fill `folder` with `files` text files of `size` bytes together, which compress about as source code does."""
    draw = random.Random(0)
    names = [f"{draw.choice(('read', 'write', 'parse', 'make'))}_{draw.randrange(1000)}" for _ in range(400)]
    for k in range(files):
        file = folder / f"package_{k % 40}" / f"module_{k}.py"
        file.parent.mkdir(exist_ok=True)
        text = ""
        while len(text) < size // files:
            one, two, three = draw.choices(names, k=3)
            text += f"def {one}(self, {two}):\n    return self.{three}[{two}] + {draw.randrange(10**6)}\n\n\n"
        file.write_text(text[: size // files])


async def diff() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        large_repository(Path(folder))
        tar = pack(Path(folder))
    took: dict[str, list[float]] = {"put_s": [], "commit_s": [], "diff_s": []}
    for number in range(ROUNDS):
        async with open_sandbox(Spec("bench-diff", "bench", Limits(disk_mb=512))) as box:
            moments = [time.perf_counter()]
            await box.put(tar, REPO)
            moments.append(time.perf_counter())
            await box.commit(REPO)
            moments.append(time.perf_counter())
            edit = "for k in 1 2 3; do echo '# edited' >> package_$k/module_$k.py; done; echo new > new.txt"
            await box.run(["sh", "-c", edit], cwd=REPO)
            moments.append(time.perf_counter())
            patch = await box.diff(REPO)
            assert patch.count(b"diff --git") == 4
            ended = time.perf_counter()
        for name, seconds in zip(
            took, (moments[1] - moments[0], moments[2] - moments[1], ended - moments[3]), strict=True
        ):
            took[name].append(seconds)
        say(f"50 MB, round {number + 1}: " + ", ".join(f"{name} {seconds[-1]:.2f}" for name, seconds in took.items()))
    out: dict[str, Any] = {name: statistics.median(seconds) for name, seconds in took.items()}
    return out | {"holds": out["diff_s"] <= BOUNDS["diff_s"]}


# -- grading -----------------------------------------------------------------------------------------------------------


async def tests_alone(task: Path) -> float:
    """Seconds of the test command itself: pytest on the task's tests, in a sandbox that has the solved repository."""
    one = load_task(task)
    async with open_sandbox(Spec("bench-tests", "bench", one.limits)) as box:
        await box.put(pack(one.repo), REPO)
        await box.put(pack(one.tests), f"{REPO}/tests")
        await box.run(["sh", "-c", "echo hi > hello.txt"], cwd=REPO)
        argv = ["python3", "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
        done = await box.run(argv, env=TEST_ENVIRONMENT, cwd=REPO)
        assert done.exit_code == 0, done.log
        return done.wall_s


async def grading(rounds: int = 3 * ROUNDS) -> dict[str, Any]:
    tests, graded, command = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        task = small_task(work, "graded")
        patch = make_patch(task, work / "scratch", {"hello.txt": "hi\n"})
        file = shard(work / "one.parquet", [attempt(task, 0, patch)])
        for k in range(rounds):
            tests.append(await tests_alone(task))
            begun = time.perf_counter()
            argv = [BIN / "lego-grade", "-q", file, "--out", work / f"graded-{k}"]
            shown = subprocess.run(argv, check=True, capture_output=True, text=True)
            command.append(time.perf_counter() - begun)
            (row,) = open_shard(shown.stdout.strip()).rows()
            assert row["reward"] == 1
            graded.append(row["grade_s"])
            say(f"tests alone {tests[-1]:.2f} s, grading {graded[-1]:.2f} s, the command {command[-1]:.2f} s")
    out = {
        "tests_s": statistics.median(tests),
        "grade_s": statistics.median(graded),
        "grading_overhead_s": statistics.median(a - b for a, b in zip(graded, tests, strict=True)),
        "command_for_one_attempt_s": statistics.median(command),
    }
    return out | {"holds": out["grading_overhead_s"] <= BOUNDS["grading_overhead_s"]}


# -- leftovers ---------------------------------------------------------------------------------------------------------

HARNESS = """#!/usr/bin/python3
import json, os, urllib.request
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": os.environ["TASK"]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"},
)
with urllib.request.urlopen(request) as reply, open("hello.txt", "w") as file:
    file.write(json.load(reply)["choices"][0]["message"]["content"] + "\\n")
"""


@contextmanager
def lego_serve(work: Path, environment: dict[str, str]) -> Iterator[str]:
    """The control socket of a running lego-serve that answers everything with "hi"."""
    (work / "script.jsonl").write_text('{"text": "hi"}\n')
    argv = ["setpriv", "--pdeathsig", "TERM", BIN / "lego-serve", MODEL, "--log", work / "log"]
    argv += ["--engine", "script", "--script", work / "script.jsonl"]
    process = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(60)


def shards_of(program: str, environment: dict[str, str], *arguments: Any) -> list[str]:
    """Run one of the commands; return the paths that it printed."""
    argv = [str(BIN / program), "-q", *map(str, arguments)]
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout.split()


async def leftovers(count: int = COUNT, group: int = 10) -> dict[str, Any]:
    group = min(group, count)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        scratch = work / "tmp"
        scratch.mkdir()
        tasks = [small_task(work, f"task-{k}") for k in range(count // group)]
        (work / "agent").write_text(HARNESS)
        (work / "agent").chmod(0o755)
        environment = {**os.environ, "TMPDIR": str(scratch)}
        with lego_serve(work, environment) as socket:
            environment["LEGORL_SERVE"] = socket
            harness = ["--harness", f"command:{work / 'agent'}", "-c", PARALLEL]
            warm = shards_of("lego-rollout", environment, tasks[0], "--out", work / "warm", "-n", 1, *harness)
            shards_of("lego-grade", environment, *warm, "--out", work / "warm-graded")
            there = set(scratch.iterdir())
            watch = await watching()
            begun = time.perf_counter()
            made = shards_of("lego-rollout", environment, *tasks, "--out", work / "out", "-n", group, *harness)
            took = time.perf_counter() - begun
            graded = shards_of("lego-rollout", environment, tasks[0], "--out", work / "more", "-n", group, *harness)
            shards_of("lego-grade", environment, *graded, "--out", work / "graded", "-c", PARALLEL)
            left = await watch.left()
            left["temporary files"] = sorted(str(path) for path in set(scratch.iterdir()) - there)
            grown = watch.grown_bytes()
        outcomes = Counter(row["outcome"] for path in made for row in open_shard(path).rows())
    for kind, names in left.items():
        for name in names:
            say(f"left behind: {kind}: {name}")
    return {
        "attempts": outcomes.total(),
        "outcomes": outcomes,
        "attempts_per_s": outcomes.total() / took,
        "left": {kind: len(names) for kind, names in left.items()},
        "disk_bytes": grown,
        "holds": not any(left.values())
        and grown <= BOUNDS["disk_bytes"]
        and outcomes == {"finished": count // group * group},
    }


PARTS = {"containers": containers, "diff": diff, "grading": grading, "leftovers": leftovers}


async def run(parts: list[str]) -> dict[str, Any]:
    await ensure_ready()
    return {part: await PARTS[part]() for part in parts}


def main() -> int:
    parts = sys.argv[1:] or list(PARTS)
    before = os.getloadavg()
    result = asyncio.run(run(parts))
    machine = {"cpus": os.cpu_count(), "processor": platform.processor() or platform.machine()}
    head = {"machine": machine, "load_before": before, "load_after": os.getloadavg(), "bounds": BOUNDS}
    print(json.dumps({**head, **result}, indent=1))
    return 0 if all(result[part]["holds"] for part in parts) else 4


if __name__ == "__main__":
    sys.exit(main())
