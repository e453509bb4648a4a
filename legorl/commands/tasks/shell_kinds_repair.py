"""Shell kinds about small scripts that fail or print the wrong thing.

Each function is one kind and draws one task of `job.level`; see shell_kinds_make for what the levels mean. From level
2 on a hidden test runs the script on other input, so that printing the expected answer is not enough.
"""

from shlex import quote
from typing import NamedTuple

from legorl.commands.tasks.shell_job import Job


class Bug(NamedTuple):
    """Line `line` (from 0) of the script reads `wrong`."""

    line: int
    wrong: str


def _repair(job: Job, name: str, right: list[str], bug: Bug, want: str, complaint: str) -> None:
    """Put the script with its bug, ask for the repair, solve it by writing the right line back."""
    broken = [*right]
    broken[bug.line] = bug.wrong
    job.put(name, broken)
    job.ask(complaint)
    job.ask(
        job.phrase(
            "It should print {want}. Fix it.",
            "Repair it so that it prints {want}.",
            "It has to print {want}; please mend the script.",
            "What it should print is {want}. Find the mistake and correct it.",
            "Make it print {want}.",
            want=want,
        )
    )
    # In the text of sed's command c a backslash stands for itself only if doubled; leading blanks need one in front.
    fixed = right[bug.line].replace("\\", "\\\\")
    job.solve(f"sed -i {quote(f'{bug.line + 1}c ' + chr(92) * fixed.startswith(' ') + fixed)} {quote(name)}")
    job.touch(name)


def repair_shell(job: Job) -> None:
    """A small shell script that fails or prints the wrong thing."""
    job.bystander()
    name = job.name("sh", plain=True)
    (_shell_word, _shell_syntax, _shell_total, _shell_limit)[job.level](job, name)


def _shell_word(job: Job, name: str) -> None:
    city = job.word("city")
    wrong = city + city[-1]
    right, bug = job.rng.choice(
        [([f"echo {city}"], Bug(0, f"echo {wrong}")), ([f"x={city}", "echo $x"], Bug(0, f"x={wrong}"))]
    )
    _repair(job, name, right, bug, city, f"The script {name} prints {wrong}.")
    job.want_output(["sh", name], city)


def _shell_syntax(job: Job, name: str) -> None:
    first, second = job.words("city", 2)
    syntax, unknown = "stops with a syntax error", "complains about a command that is not found"
    loop = ["#!/bin/sh", f"for x in {first} {second}; do", '    echo "$x"', "done"]
    assignment = ["#!/bin/sh", f'name="{first}"', 'echo "$name"', f"echo {second}"]
    condition = ["#!/bin/sh", f'if [ "{first}" != "" ]; then', f"    echo {first}", "fi", f"echo {second}"]
    right, bug, symptom = job.rng.choice(
        [
            (loop, Bug(3, "end"), syntax),
            (loop, Bug(1, f"for x in {first} {second} do"), syntax),
            (assignment, Bug(1, f'name = "{first}"'), unknown),
            (assignment, Bug(3, f"ehco {second}"), unknown),
            (condition, Bug(3, "end if"), syntax),
            (condition, Bug(1, f'if ["{first}" != "" ]; then'), unknown),
        ]
    )
    want = f"`{first}` and `{second}`, each on its own line"
    _repair(job, name, right, bug, want, f"The script `{name}` {symptom}.")
    job.want_output(["sh", name], f"{first}\n{second}")


def _shell_total(job: Job, name: str) -> None:
    folder = job.folder(plain=True)
    counts = [job.number(2, 5), job.number(6, 9)]
    for count in counts:
        job.put(f"{folder}/{job.word('adjective')} {job.word('stem')}.txt", job.sentences(count))
    right = [
        "#!/bin/sh",
        "total=0",
        f"for f in {folder}/*.txt; do",
        '    n=$(wc -l < "$f")',
        "    total=$((total + n))",
        "done",
        "echo $total",
    ]
    bugs = (
        Bug(3, "    n=$(cat $f | wc -l)"),
        Bug(2, f"for f in $(ls {folder}/*.txt); do"),
        Bug(4, "    total=$((total + 1))"),
        Bug(4, "    total=$n"),
        Bug(3, '    n=$(wc -w < "$f")'),
    )
    complaint = f"`{name}` adds up the lines of the .txt files in `{folder}`, but the result is wrong."
    total = sum(counts)
    _repair(job, name, right, job.rng.choice(bugs), f"`{total}`", complaint)
    job.want_output(["bash", name], str(total))
    job.want_output(["bash", name], str(total + 1), given={f"{folder}/zz.txt": "one\n"})


def _shell_limit(job: Job, name: str) -> None:
    low = job.number(20, 60)
    right = [
        "#!/bin/sh",
        "# Say whether a number is small or large.",
        f'if [ "$1" -lt {low} ]; then',
        "    echo small",
        "else",
        "    echo large",
        "fi",
    ]
    bugs = (
        Bug(2, f'if [ "$1" -gt {low} ]; then'),
        Bug(2, f'if [ "$1" \\< {low} ]; then'),
        Bug(2, f'if [ "$2" -lt {low} ]; then'),
        Bug(2, f'if [ "$1" -le {low} ]; then'),
    )
    want = f"`small` for a number below {low} and `large` from {low} on"
    complaint = f"The script `{name}` takes one number as its argument, and its answer is not always right."
    _repair(job, name, right, job.rng.choice(bugs), want, complaint)
    answers = {str(n): "small" if n < low else "large" for n in (1, 9, low - 1, low, low + 1, low + 100)}
    job.test(
        "answers",
        f"answers = {answers!r}",
        f"assert {{number: run('sh', {name!r}, number) for number in answers}} == answers",
    )


def repair_python(job: Job) -> None:
    """A small Python script that fails or prints the wrong thing."""
    job.bystander()
    name = job.name("py", plain=True)
    (_python_word, _python_loop, _python_sum, _python_largest)[job.level](job, name)


def _python_word(job: Job, name: str) -> None:
    word = job.word("item")
    wrong = job.rng.choice([f'pritn("{word}")', f'print("{word}"', f"print({word})", f'print("{word})'])
    _repair(job, name, [f'print("{word}")'], Bug(0, wrong), word, f"The Python script {name} stops with an error.")
    job.want_output(["python3", name], word)


def _python_loop(job: Job, name: str) -> None:
    words = job.words("item", 3)
    right = [f"words = {words!r}", "for word in words:", "    print(word)"]
    bugs = (
        Bug(1, "for word in words"),
        Bug(2, "print(word)"),
        Bug(1, "for word in word:"),
        Bug(0, right[0].rstrip("]")),
        Bug(2, "    print(wrod)"),
    )
    want = f"`{words[0]}`, `{words[1]}` and `{words[2]}`, each on its own line"
    _repair(job, name, right, job.rng.choice(bugs), want, f"The Python script `{name}` stops with an error.")
    job.want_output(["python3", name], "\n".join(words))


def _python_sum(job: Job, name: str) -> None:
    numbers = [job.number(3, 60) for _ in range(5)]
    source = job.put(job.name("txt"), map(str, numbers))
    right = [
        f"with open({source!r}) as file:",
        "    numbers = [int(line) for line in file]",
        "total = 0",
        "for number in numbers:",
        "    total += number",
        "print(total)",
    ]
    bugs = (
        Bug(4, "    total = number"),
        Bug(3, "for number in numbers[1:]:"),
        Bug(2, "total = 1"),
        Bug(4, "    total -= number"),
        Bug(3, "for number in range(len(numbers)):"),
    )
    want = f"the sum of the numbers in `{source}`, here `{sum(numbers)}`"
    _repair(job, name, right, job.rng.choice(bugs), want, f"The Python script `{name}` prints the wrong number.")
    job.want_output(["python3", name], str(sum(numbers)))
    job.want_output(["python3", name], "736", given={source: "5\n700\n31\n"})


def _python_largest(job: Job, name: str) -> None:
    # One digit first, three digits later: the largest is neither first nor last nor largest as text.
    numbers = [9, *(job.number(10, 60) for _ in range(2)), job.number(400, 800), job.number(100, 300)]
    source = job.put(job.name("txt"), map(str, numbers))
    right = [
        f"with open({source!r}) as file:",
        "    numbers = [int(line) for line in file]",
        "best = numbers[0]",
        "for number in numbers:",
        "    if number > best:",
        "        best = number",
        "print(best)",
    ]
    bugs = (
        Bug(1, "    numbers = [line.strip() for line in file]"),
        Bug(4, "    if number < best:"),
        Bug(3, "for number in numbers[:2]:"),
        Bug(5, "        best == number"),
        Bug(2, "best = 1000"),
    )
    want = f"the largest of the numbers in `{source}`, here `{max(numbers)}`"
    _repair(job, name, right, job.rng.choice(bugs), want, f"The Python script `{name}` prints the wrong number.")
    job.want_output(["python3", name], str(max(numbers)))
    job.want_output(["python3", name], "700", given={source: "8\n5\n700\n31\n"})
