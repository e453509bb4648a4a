"""Shell kinds about several files at once: join and split.

Each function is one kind and draws one task of `job.level`; see shell_kinds_make for what the levels mean.
"""

from shlex import quote

from legorl.commands.tasks.shell_job import Job, paths


def join(job: Job) -> None:
    """Files one after the other."""
    job.bystander()
    if job.level == 3:
        folder, out = job.folder(), job.name()
        numbers = sorted(job.rng.sample(range(1, 9), 2)) + sorted(job.rng.sample(range(10, 30), 2))
        wanted = []
        for number in numbers:
            lines = job.sentences(2)
            job.put(f"{folder}/part-{number}.txt", lines)
            wanted += lines
        job.ask(
            job.phrase(
                "Join the parts in {folder} to one file {out}, in the order of their numbers (part-9 before part-10).",
                "Concatenate {files} by increasing number into {out}; mind that 9 comes before 10.",
                "Put the numbered parts of {folder} together again, lowest number first, as {out}.",
                "{folder} has the pieces of a text, part-NUMBER.txt. Write the whole, ordered by number, to {out}.",
                "A text was cut into the files {parts}. {out} shall be the whole, in numeric order.",
                folder=job.show(folder),
                out=job.show(out),
                files=job.show(folder + "/part-*.txt"),
                parts=job.show(folder + "/part-NUMBER.txt"),
            )
        )
        job.solve(f"(cd {quote(folder)} && ls | sort -V | xargs cat) > {quote(out)}")
        job.want_text(out, wanted, main=True)
        return
    names = [job.name("csv" if job.level == 2 else "txt") for _ in range(2 + (job.level > 0))]
    out = job.name("csv" if job.level == 2 else "txt")
    shown = ", ".join(map(job.show, names[:-1])) + " and " + job.show(names[-1])
    header, wanted = "name,city", []
    for name in names:
        if job.level == 2:
            lines = [f"{job.word('person')},{job.word('city')}" for _ in range(3)]
            job.put(name, [header, *lines])
        else:
            lines = job.sentences(2)
            job.put(name, lines)
        wanted += lines
    job.ask(
        job.phrase(
            "Join the files {shown}, in this order, to a new file {out}.",
            "Concatenate {shown} in this order and write the result to {out}.",
            "Write the contents of {shown}, one after the other, to {out}.",
            "Make {out} out of {shown}, in that order.",
            "{out} shall consist of {shown}, put behind each other in the given order.",
            shown=shown,
            out=job.show(out),
        )
    )
    if job.level == 2:
        job.ask("Each has the same header line; the result has it once, at the top.")
        job.solve(f'(head -n 1 {quote(names[0])}; for f in {paths(*names)}; do tail -n +2 "$f"; done) > {quote(out)}')
        job.want_text(out, [header, *wanted], main=True)
    else:
        job.solve(f"cat {paths(*names)} > {quote(out)}")
        job.want_text(out, wanted, main=True)


def split(job: Job) -> None:
    """One file into several."""
    job.bystander()
    source = job.name("txt" if job.level < 2 else "csv")
    if job.level < 2:
        lines, at = job.sentences(job.size(6)), job.number(2, 4)
        job.put(source, lines)
        first, second = job.name(), job.name()
        if job.level == 1:
            mark = "-----"
            job.put(source, [*lines[:at], mark, *lines[at:]])
            where = f"above the line '{mark}' to {job.show(first)} and what is below it to {job.show(second)}"
            job.ask(
                job.phrase(
                    "Split {source}: write what is {where}. The line itself goes to neither.",
                    "Cut {source} in two. Write what stands {where}, and leave out that line.",
                    "From {source}, write the part {where}. Drop the line in between.",
                    "{source} has two parts. Save the one {where}, both without that line.",
                    "Part {source} in two: the lines {where}; the line between them is dropped.",
                    source=job.show(source),
                    where=where,
                )
            )
            job.solve(f"sed '/^{mark}$/,$d' {quote(source)} > {quote(first)}")
            job.solve(f"sed '1,/^{mark}$/d' {quote(source)} > {quote(second)}")
        else:
            job.ask(
                job.phrase(
                    "Write the first {at} lines of {source} to {first} and the rest to {second}.",
                    "Split {source}: the first {at} lines go to {first}, all other lines to {second}.",
                    "Put lines 1 to {at} of {source} into {first} and the remaining lines into {second}.",
                    "Cut {source} after line {at}. The upper part is {first}, the lower part {second}.",
                    "Of {source}, {first} gets the first {at} lines; {second} gets what is left.",
                    at=at,
                    source=source,
                    first=first,
                    second=second,
                )
            )
            job.solve(f"head -n {at} {source} > {first} && tail -n +{at + 1} {source} > {second}")
        job.ask(f"Keep {job.show(source)} as it is.")
        job.want_text(first, lines[:at], main=True)
        job.want_text(second, lines[at:], main=True)
        return
    folder, cities = job.folder(), job.words("city", 3)
    rows = [f"{job.word('person')},{job.rng.choice(cities)},{job.number(1, 99)}" for _ in range(7)]
    rows += [f"{job.word('person')},{city},{job.number(1, 99)}" for city in cities]
    header = job.level == 3
    job.put(source, [*(["name,city,amount"] if header else []), *rows])
    job.ask(
        job.phrase(
            "Split {source} by city, its second column: write each row to CITY.csv in a new folder {folder}.",
            "For every city (second column) in {source}, make a file CITY.csv with its rows in the new {folder}.",
            "Distribute the rows of {source} over files CITY.csv in a new folder {folder}; the city is column two.",
            "Make one file a city from {source}: a new folder {folder} gets CITY.csv for each value of column two.",
            "The second column of {source} names a city. A new folder {folder} shall have a CITY.csv for each.",
            source=job.show(source),
            folder=job.show(folder),
        )
    )
    job.ask(
        f"Keep {job.show(source)} itself. Rows keep their order."
        + (" Every file begins with the header line." if header else "")
    )
    start = 'NR == 1 {h = $0; next} !($2 in seen) {seen[$2]; print h > (d "/" $2 ".csv")} ' if header else ""
    program = start + '{print > (d "/" $2 ".csv")}'
    job.solve(f"mkdir {quote(folder)} && awk -F, -v d={quote(folder)} {quote(program)} {quote(source)}")
    for city in cities:
        mine = [row for row in rows if row.split(",")[1] == city]
        job.want_text(f"{folder}/{city}.csv", [*(["name,city,amount"] if header else []), *mine], main=True)
