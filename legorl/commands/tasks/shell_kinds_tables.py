"""Shell kinds about data in rows: columns, order, duplicates, sums, JSON, lists compared.

Each function is one kind and draws one task of `job.level`; see shell_kinds_make for what the levels mean.
"""

import csv
import io
import json
from shlex import quote

from legorl.commands.tasks.shell_job import Job, paths


def _table(job: Job, rows: int, names: list[str]) -> list[list[str]]:
    """Draw a table: header `names`, then rows of person, city, item, number (as many columns as names)."""
    table = [names]
    for _ in range(rows):
        row = [job.word("person"), job.word("city"), job.word("item"), str(job.number(2, 99))]
        table.append(row[: len(names)] if len(names) < 4 else row)
    return table


def _csv(rows: list[list[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def column(job: Job) -> None:
    """One column of a table."""
    job.bystander()
    source, out = job.name("csv"), job.name()
    names = ["name", "city", "item", "amount"]
    rows = _table(job, (4, 6, 8, 12)[job.level], names)
    pick = 0 if job.level == 0 else job.number(1, 2)
    wanted = [row[pick] for row in rows[1:]]
    if job.level == 0:
        rows = rows[1:]
        job.ask(
            job.phrase(
                "Write the first column of {source} to {out}. The columns are separated by commas.",
                "Extract the first column of the comma-separated file {source} into {out}.",
                "Take the first column of {source} (fields are separated by commas) and save it in {out}.",
                "Copy only the first comma-separated field of each line of {source} into {out}.",
                "{out} shall hold the first field of every line in {source}; commas separate the fields.",
                source=source,
                out=out,
            )
        )
        job.solve(f"cut -d, -f1 {quote(source)} > {quote(out)}")
    else:
        label, rule = names[pick], ""
        if job.level >= 2:
            low = job.number(30, 60)
            rows[1][3], rows[2][3] = str(low + 1), str(low)
            wanted = [row[pick] for row in rows[1:] if int(row[3]) > low]
            rule = f" of those rows whose amount is greater than {low}"
        job.ask(
            job.phrase(
                "Write the column {label}{rule} from {source} to {out}, one value a line, without the header.",
                "From {source}, extract the {label}{rule} into {out}: one a line and no header.",
                "Save the values of the column {label}{rule} in {source} as {out}, leaving out the header line.",
                "Make {out}: it holds the {label}{rule} in {source}, a value a line, no heading.",
                "{out} shall list, line by line and without a heading, the {label}{rule} in {source}.",
                label=label,
                rule=rule,
                source=job.show(source),
                out=job.show(out),
            )
        )
        if job.level == 3:
            for k in range(1, len(rows), 2):
                rows[k][0] = f"{rows[k][0]}, {job.word('adjective')}"
            job.ask("Some fields contain commas and are quoted, as usual in CSV.")
            code = (
                "import csv, sys\nfor r in csv.DictReader(open(sys.argv[1])):\n"
                f"    if int(r['amount']) > {low}: print(r['{label}'])"
            )
            job.solve(f"python3 -c {quote(code)} {quote(source)} > {quote(out)}")
        elif job.level == 2:
            job.solve(f"awk -F, 'NR > 1 && $4 > {low} {{print ${pick + 1}}}' {quote(source)} > {quote(out)}")
        else:
            job.solve(f"tail -n +2 {quote(source)} | cut -d, -f{pick + 1} > {quote(out)}")
    job.put(source, _csv(rows))
    job.want_text(out, wanted, main=True)


def sort(job: Job) -> None:
    """Lines in order."""
    job.bystander()
    source, out = job.name("txt" if job.level < 2 else "csv"), job.name("txt" if job.level < 2 else "csv")
    if job.level == 0:
        lines = job.words("item", 6)
        wanted, what, command = sorted(lines), "alphabetically", "sort"
    elif job.level == 1:
        lines = [str(n) for n in job.rng.sample(range(2, 400), 8)]
        down = job.rng.random() < 0.5
        wanted = sorted(lines, key=int, reverse=down)
        what = "as numbers, " + ("largest first" if down else "smallest first")
        command = "sort -n" + ("r" if down else "")
    else:
        rows = _table(job, (8, 12)[job.level == 3], ["name", "city", "item", "amount"])
        amounts = job.rng.sample(range(2, 200), len(rows) - 1)
        for row, amount in zip(rows[1:], amounts, strict=True):
            row[3] = str(amount if job.level == 2 else amount % 3 + 9)
        key = (lambda r: -int(r[3])) if job.level == 2 else (lambda r: (-int(r[3]), r[0]))
        lines = [",".join(row) for row in rows]
        wanted = [lines[0], *(",".join(r) for r in sorted(rows[1:], key=key))]
        what = "by the number in the column amount, largest first" + (
            ", and rows of equal amount by name from a to z" if job.level == 3 else ""
        )
        command = "sort -t, -k4,4nr" + (" -k1,1" if job.level == 3 else "")
    job.put(source, lines)
    rest = " The header line stays on top." if job.level >= 2 else ""
    job.ask(
        job.phrase(
            "Sort the lines of {source} {what} and write the result to {out}.",
            "Sort {source} {what}. Save the sorted lines in {out}.",
            "Write the lines of {source}, sorted {what}, to {out}.",
            "Bring the lines of {source} in order, {what}; the result is {out}.",
            "{out} shall hold the lines of {source}, ordered {what}.",
            source=job.show(source),
            what=what,
            out=job.show(out),
        )
        + rest
    )
    if job.level >= 2:
        job.solve(f"(head -n 1 {quote(source)}; tail -n +2 {quote(source)} | {command}) > {quote(out)}")
    else:
        job.solve(f"{command} {quote(source)} > {quote(out)}")
    job.want_text(out, wanted, main=True)


def unique(job: Job) -> None:
    """Repeated lines once, or only those."""
    job.bystander()
    source, out = job.name(), job.name()
    words = job.words("city", 5)
    lines = [*words, *job.rng.sample(words, 3)]
    job.rng.shuffle(lines)
    name = quote(source)
    what, command = (
        ("every different line once, sorted alphabetically", f"sort -u {name}"),
        ("those lines that occur more than once, each once, sorted alphabetically", f"sort {name} | uniq -d"),
        ("every different line once, in the order of its first appearance", f"awk '!seen[$0]++' {name}"),
        (
            "those lines that occur exactly once, in their old order",
            f"awk 'NR==FNR {{n[$0]++; next}} n[$0]==1' {name} {name}",
        ),
    )[job.level]
    wanted = (
        sorted(words),
        sorted(word for word in words if lines.count(word) > 1),
        list(dict.fromkeys(lines)),
        [line for line in lines if lines.count(line) == 1],
    )[job.level]
    job.put(source, lines)
    job.ask(
        job.phrase(
            "Some lines of {source} are repeated. Write {what}, to {out}.",
            "Write {what}, from {source} to {out}.",
            "Take {what}, from {source} and save the result as {out}.",
            "From {source}, put {what}, into {out}.",
            "What {out} shall hold of {source}: {what}.",
            source=job.show(source),
            what=what,
            out=job.show(out),
        )
    )
    job.solve(f"{command} > {quote(out)}")
    job.want_text(out, wanted, main=True)


def json_field(job: Job) -> None:
    """A value out of a JSON file."""
    job.bystander()
    source, out = job.name("json"), job.name()
    person, city = job.word("person"), job.word("city")
    if job.level < 2:
        data: dict = {"id": job.number(100, 999), "name": person, "city": city, "items": job.words("item", 2)}
        key = job.rng.choice(["name", "city"])
        wanted = [data[key]]
        what, get = f"the value of {job.show(key)}", f"[{key!r}]"
        if job.level == 1:
            data = {"version": 1, "owner": data, "name": job.word("item"), "city": job.word("noun")}
            what, get = f"the value of {job.show(key)} inside {job.show('owner')}", f"['owner'][{key!r}]"
        code = f"import json; print(json.load(open({source!r})){get})"
    else:
        people = [
            {"name": name, "city": place, "age": job.number(18, 80), "active": job.rng.random() < 0.5}
            for name, place in zip(job.words("person", 6), job.words("city", 6), strict=True)
        ]
        people[0]["active"], people[1]["active"] = True, False
        data = {"people": people, "total": 6}
        if job.level == 2:
            wanted = [p["name"] for p in people]
            what, rule = "the name of every entry in the list `people` (one a line, in the order of the list)", ""
        else:
            wanted = sorted(p["name"] for p in people if p["active"])
            what, rule = (
                "the names of those `people` whose `active` is true (one a line, sorted alphabetically)",
                "if p['active']",
            )
        inner = f"p['name'] for p in json.load(open({source!r}))['people'] {rule}".rstrip()
        code = f"import json; print(*{'sorted' if rule else ''}({inner}), sep=chr(10))"
    job.put(source, json.dumps(data, indent=2) + "\n")
    job.ask(
        job.phrase(
            "Read {source} and write {what} to {out}.",
            "Write {what} from {source} to the file {out}.",
            "From the JSON file {source}, save {what} in {out}.",
            "Look into {source} and put {what} into {out}.",
            "{out} shall hold {what} as found in {source}.",
            source=job.show(source),
            what=what,
            out=job.show(out),
        )
    )
    job.ask("Write it without quotation marks.")
    job.solve(f"python3 -c {quote(code)} > {quote(out)}")
    job.want_text(out, wanted, main=True)


def csv_sum(job: Job) -> None:
    """Numbers of a table added up."""
    job.bystander()
    source, out = job.name("csv"), job.name()
    rows = _table(job, (4, 6, 10, 18)[job.level], ["name", "city", "item", "amount"])
    total = sum(int(row[3]) for row in rows[1:])
    name = quote(source)
    if job.level == 0:
        rows = [[row[2], row[3]] for row in rows[1:]]
        what = "the numbers in the second column"
        command = f"awk -F, '{{s += $2}} END {{print s}}' {name}"
    elif job.level == 1:
        what = "the numbers in the column `amount`"
        command = f"awk -F, '{{s += $4}} END {{print s}}' {name}"
    else:
        cities = job.words("city", 3)
        for k, row in enumerate(rows[1:]):
            row[1] = cities[k % 3]
        if job.level == 2:
            total = sum(int(row[3]) for row in rows[1:] if row[1] == cities[0])
            what = f"the numbers in the column `amount` of the rows whose city is `{cities[0]}`"
            command = f"awk -F, '$2 == \"{cities[0]}\" {{s += $4}} END {{print s}}' {name}"
        else:
            sums = {city: sum(int(row[3]) for row in rows[1:] if row[1] == city) for city in cities}
            job.put(source, _csv(rows))
            job.ask(
                job.phrase(
                    "Add up the column `amount` of {source} for each city. Write lines 'CITY,SUM' to {out}.",
                    "For every city in {source}, write a line 'CITY,SUM' to {out}; SUM adds up its `amount`.",
                    "Sum `amount` per city in {source} and save lines of the form 'CITY,SUM' as {out}.",
                    "Group {source} by city and put the sums of `amount` into {out}, as 'CITY,SUM'.",
                    "{out} shall give, city by city, the total `amount` in {source}: 'CITY,SUM' on each line.",
                    source=job.show(source),
                    out=job.show(out),
                )
            )
            job.ask("No header; the order does not matter.")
            job.solve(f"awk -F, 'NR > 1 {{s[$2] += $4}} END {{for (c in s) print c\",\"s[c]}}' {name} > {quote(out)}")
            job.want_lines(out, [f"{city},{amount}" for city, amount in sums.items()])
            return
    job.put(source, _csv(rows))
    job.ask(
        job.phrase(
            "Add up {what} of {source} and write the sum to {out}.",
            "Write the sum of {what} in {source} to {out}.",
            "What do {what} of {source} add up to? Write it to {out}.",
            "Compute the total of {what} in {source}; save it as {out}.",
            "{out} shall state the total of {what} in {source}.",
            what=what,
            source=job.show(source),
            out=job.show(out),
        )
    )
    job.ask("Write only the number.")
    job.solve(f"{command} > {quote(out)}")
    job.want_number(out, total)


def tally(job: Job) -> None:
    """How often each line occurs."""
    job.bystander()
    source, out = job.name("txt" if job.level < 2 else "log"), job.name()
    words = job.words("person", 3 + job.level)
    counts = dict(zip(words, job.rng.sample(range(1, 8), len(words)), strict=True))
    lines = [word for word, count in counts.items() for _ in range(count)]
    job.rng.shuffle(lines)
    ranked = sorted(counts, key=lambda w: -counts[w])
    what, command = "line", f"sort {quote(source)}"
    if job.level >= 2:
        lines = [f"{job.number(1, 12):02d}:{job.number(0, 59):02d} {line} {job.word('verb')}" for line in lines]
        what, command = "name (the second word of a line)", f"cut -d' ' -f2 {quote(source)} | sort"
        job.ask(f"Each line of {job.show(source)} is a time, a name and a verb.")
    job.put(source, lines)
    job.ask(f"Count how often every different {what} occurs in {job.show(source)}.")
    if job.level == 0:
        job.ask(f"Write the most frequent one to {job.show(out)}, only the word.")
        job.solve(f"{command} | uniq -c | sort -nr | head -n 1 | awk '{{print $2}}' > {quote(out)}")
        job.want_text(out, ranked[0], main=True)
        return
    ranked = [w for w in ranked if counts[w] > 1] if job.level == 3 else ranked
    job.ask(f"Write lines of the form 'NAME COUNT' to {job.show(out)}, the highest count first.")
    if job.level == 3:
        job.ask("Leave out what occurs only once.")
    rule = "$1 > 1 " if job.level == 3 else ""
    job.solve(f"{command} | uniq -c | sort -nr | awk '{rule}{{print $2\" \"$1}}' > {quote(out)}")
    job.want_text(out, [f"{w} {counts[w]}" for w in ranked], main=True)


def compare(job: Job) -> None:
    """What two lists have in common, or not."""
    job.bystander()
    first, second, out = job.name(), job.name(), job.name()
    words = job.words("item", 9)
    left, right = words[:6], words[3:]
    job.rng.shuffle(left)
    job.rng.shuffle(right)
    job.put(first, left)
    job.put(second, right)
    if job.level == 0:
        wanted, what = (
            [w for w in left if w in right],
            f"the lines that are in both {job.show(first)} and {job.show(second)}",
        )
        command = f"grep -xFf {paths(second, first)}"
    elif job.level == 1:
        wanted, what = (
            [w for w in left if w not in right],
            f"the lines of {job.show(first)} that are missing in {job.show(second)}",
        )
        command = f"grep -vxFf {paths(second, first)}"
    elif job.level == 2:
        wanted, what = (
            sorted({*left} ^ {*right}),
            f"the lines that stand in only one of {job.show(first)} and {job.show(second)}",
        )
        command = f"sort {paths(first, second)} | uniq -u"
    else:
        shouted = [w.upper() if k % 2 else w for k, w in enumerate(right)]
        job.put(second, shouted)
        wanted, what = (
            [w for w in left if w not in right],
            f"the lines of {job.show(first)} that {job.show(second)} lacks, be it in capital or small letters",
        )
        command = f"grep -vixFf {paths(second, first)}"
    job.ask(f"Write {what}, to {job.show(out)}. The order does not matter.")
    job.solve(f"{command} > {quote(out)}")
    job.want_lines(out, wanted)
