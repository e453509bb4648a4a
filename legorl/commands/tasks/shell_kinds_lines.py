"""Shell kinds about single lines of a file: add, change, drop, number.

Each function is one kind and draws one task of `job.level`; see shell_kinds_make for what the levels mean.
"""

from shlex import quote

from legorl.commands.tasks.shell_job import Job, printf

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def append(job: Job) -> None:
    """Lines at the end."""
    job.bystander()
    name = job.name() if job.level == 0 else f"{job.folder()}/{job.name()}"
    old = job.sentences(job.size(2))
    new = job.sentences((1, 1, 2, 2)[job.level])
    trap = job.level == 3
    job.put(name, "\n".join(old) + ("" if trap else "\n"))
    if len(new) == 1:
        job.ask(
            job.phrase(
                "Append the line '{line}' to the file {name}.",
                "Add this line to the end of {name}: {line}",
                "Add the line '{line}' at the end of {name}.",
                "The file {name} needs one more line at its end: {line}",
                "After its last line, {name} shall also say: {line}",
                line=new[0],
                name=job.show(name),
            )
        )
    else:
        job.ask(
            job.phrase(
                "Append these lines to {name}:",
                "Add the following lines at the end of {name}:",
                "Please continue {name} with these lines:",
                "{name} should go on with the lines below:",
                "What follows belongs behind the last line of {name}, line by line:",
                name=job.show(name),
            )
            + job.block(new)
        )
    if trap:
        job.solve(f"echo >> {quote(name)}")
    job.solve(f"{printf(new)} >> {quote(name)}")
    job.want_text(name, [*old, *new], main=True)


def prepend(job: Job) -> None:
    """Lines at the beginning."""
    job.bystander()
    if job.level < 2:
        name = job.name() if job.level == 0 else f"{job.folder()}/{job.name()}"
        old, line = job.sentences(3), job.sentence()
        job.put(name, old)
        job.ask(
            job.phrase(
                "Insert the line '{line}' at the beginning of the file {name}.",
                "Add this line at the top of {name}: {line}",
                "Put the line '{line}' before the first line of {name}.",
                "Let {name} begin with a new first line: {line}",
                "The opening line of {name} is missing. It reads: {line}",
                line=line,
                name=job.show(name),
            )
        )
        job.solve(f"sed -i {quote('1i ' + line)} {quote(name)}")
        job.want_text(name, [line, *old], main=True)
        return
    folder, extension = job.folder(), job.rng.choice(["txt", "md"])
    line = f"{job.rng.choice(['Author', 'Owner', 'Source', 'Status', 'Place'])}: {job.word('person')}"
    shebang = job.level == 3
    ending = "sh" if shebang else extension
    if shebang:
        line = f"# {line}"
        job.ask(
            job.phrase(
                "Add the line '{line}' to every .sh file in {folder}, directly below its first line, #!/bin/sh.",
                "Each .sh file in {folder} starts with #!/bin/sh. Insert '{line}' as its second line.",
                "Insert '{line}' after the shebang of all .sh files in {folder}.",
                "The scripts (*.sh) in {folder} should have '{line}' on line two, under the shebang.",
                "Second line of each script {files}, below the #! line, has to be: {line}",
                line=line,
                folder=job.show(folder),
                files=job.show(folder + "/*.sh"),
            )
        )
        job.solve(f"sed -i {quote('1a ' + line)} {quote(folder)}/*.sh")
    else:
        job.ask(
            job.phrase(
                "Add the line '{line}' at the top of every .{ending} file in {folder}.",
                "All .{ending} files in {folder} should begin with the line '{line}'. Insert it.",
                "Insert a new first line '{line}' into each .{ending} file of the folder {folder}.",
                "Start every file {files} with this extra line: {line}",
                "Whatever ends in .{ending} in {folder} gets one more line, at its very top: {line}",
                line=line,
                ending=ending,
                folder=job.show(folder),
                files=job.show(folder + "/*." + ending),
            )
        )
        job.solve(f"sed -i {quote('1i ' + line)} {quote(folder)}/*.{ending}")
    for _ in range(3):
        name = f"{folder}/{job.name(ending)}"
        old = ["#!/bin/sh", f"echo {job.word('city')}"] if shebang else job.sentences(2)
        job.put(name, old, executable=shebang)
        job.want_text(name, [old[0], line, *old[1:]] if shebang else [line, *old], main=True)
    job.bystander(extension="csv", folder=f"{folder}/")


def edit_line(job: Job) -> None:
    """One line, named by its number or its beginning, gets new text."""
    job.bystander()
    name = job.name() if job.level == 0 else f"{job.folder()}/{job.name()}"
    lines = job.sentences(job.size(4))
    place = job.number(1, min(len(lines), 8) - 1)
    new = job.sentence()
    if job.level == 1:
        label = job.word("person").title()
        lines[place] = f"{label}: {lines[place]}"
        new = f"{label}: {new}"
        job.ask(
            job.phrase(
                "In {name}, one line starts with '{label}:'. Replace that line with: {new}",
                "Change the line of {name} that begins with '{label}:' to: {new}",
                "The entry of {label} in {name} is out of date. Its line should read: {new}",
                "Update the line '{label}: ...' in {name}. The new line is: {new}",
                "{name} has a line for {label}, marked by the name and a colon. From now on it says: {new}",
                name=job.show(name),
                label=label,
                new=new,
            )
        )
        job.solve(f"sed -i {quote(f'/^{label}:/c {new}')} {quote(name)}")
    elif job.level == 0:
        job.ask(
            job.phrase(
                "Change line {number} of the file {name} to: {new}",
                "Replace line {number} of {name} with: {new}",
                "In {name}, line {number} should read: {new}",
                "Line {number} of {name} is wrong. Make it: {new}",
                "Let the line with number {number} in {name} become: {new}",
                number=place + 1,
                name=name,
                new=new,
            )
        )
        job.solve(f"sed -i {quote(f'{place + 1}c {new}')} {quote(name)}")
    else:
        count = len(lines) - place
        where = (
            f"the {ORDINALS[place]} line"
            if job.level == 2
            else ("the last line" if count == 1 else f"line {count} from the end")
        )
        job.ask(
            job.phrase(
                "Replace {where} of {name} with: {new}",
                "In {name}, change {where} to: {new}",
                "{start} of {name} has to be: {new}",
                "Please overwrite {where} in {name} by this: {new}",
                "As for {name}: {where} shall from now on read: {new}",
                where=where,
                name=job.show(name),
                new=new,
                start=where.capitalize(),
            )
        )
        if job.level == 3:
            job.ask(
                job.phrase(
                    "The file has Windows line endings (CRLF); keep them.",
                    "Mind the line endings: the file uses CRLF and must still do so afterwards.",
                    "Every line ends in carriage return and line feed, and that must stay so.",
                    "It is a file with CRLF line ends. They stay.",
                    "Its lines end the Windows way (CRLF), the new one too.",
                )
            )
            job.put(name, "".join(f"{line}\r\n" for line in lines))
            job.solve(f"sed -i {quote(f'{place + 1}s/.*/{new}{chr(92)}r/')} {quote(name)}")
            lines[place] = new
            job.want_bytes(name, "".join(f"{line}\r\n" for line in lines).encode())
            return
        job.solve(f"sed -i {quote(f'{place + 1}c {new}')} {quote(name)}")
    job.put(name, lines)
    lines[place] = new
    job.want_text(name, lines, main=True)


def insert_line(job: Job) -> None:
    """A line after or before a known one."""
    job.bystander()
    name = job.name() if job.level == 0 else f"{job.folder()}/{job.name()}"
    lines = job.sentences(job.size(4))
    place = job.number(1, len(lines) - 2)
    anchor, new = lines[place], job.sentence()
    if job.level < 2:
        side = "after" if job.level == 0 else job.rng.choice(["after", "before"])
        job.ask(
            job.phrase(
                "In {name}, insert the line '{new}' {side} the line '{anchor}'.",
                "Add the line '{new}' to {name}, directly {side} the line '{anchor}'.",
                "Insert '{new}' as a new line {side} '{anchor}' in the file {name}.",
                "The file {name} lacks a line: '{new}'. It comes right {side} '{anchor}'.",
                "Find '{anchor}' in {name}. Immediately {side} that line, the line '{new}' has to be added.",
                name=job.show(name),
                new=new,
                side=side,
                anchor=anchor,
            )
        )
        job.put(name, lines)
        command = "a" if side == "after" else "i"
        job.solve(f"sed -i {quote(f'/^{anchor}$/{command} {new}')} {quote(name)}")
        lines.insert(place + (side == "after"), new)
        job.want_text(name, lines, main=True)
        return
    # A heading in a document: a new entry goes to the end of one section, or to its top.
    heads = [f"## {word.title()}" for word in job.words("city", 3)]
    sections = [[f"- {job.sentence()}" for _ in range(job.number(1, 3))] for _ in heads]
    which, entry = job.number(0, 1), f"- {new}"
    top = job.level == 2
    where = "first" if top else "last"
    job.ask(
        job.phrase(
            "Add '{entry}' to {name} as the {where} entry of the section '{head}'.",
            "In {name}, under the heading '{head}', insert '{entry}' as the {where} list entry.",
            "The section '{head}' of {name} gets a new {where} entry: {entry}",
            "Put the entry '{entry}' into {name}: {where} in the list under '{head}'.",
            "List '{entry}' under '{head}' in {name}. It has to stand {where} there.",
            entry=entry,
            name=job.show(name),
            where=where,
            head=heads[which],
        )
    )
    job.ask("Sections are separated by one empty line, as before.")

    def render() -> list[str]:
        blocks = [[head, *entries] for head, entries in zip(heads, sections, strict=True)]
        return [line for block in blocks for line in [*block, ""]][:-1]

    job.put(name, render())
    if top:
        job.solve(f"sed -i {quote(f'/^{heads[which]}$/a {entry}')} {quote(name)}")
    else:
        script = f"/^{heads[which]}$/,/^$/{{\n/^$/i {entry}\n}}"
        job.solve(f"sed -i {quote(script)} {quote(name)}")
    sections[which].insert(0 if top else len(sections[which]), entry)
    job.want_text(name, render(), main=True)


def delete_line(job: Job) -> None:
    """Lines away, by text or by rule."""
    job.bystander()
    name = job.name() if job.level == 0 else f"{job.folder()}/{job.name()}"
    lines = job.sentences(job.size(4))
    if job.level == 0:
        gone = [job.rng.choice(lines)]
        job.ask(
            job.phrase(
                "Delete the line '{line}' from the file {name}.",
                "Remove the line '{line}' from {name}.",
                "Take the line '{line}' out of {name}.",
                "The line '{line}' in {name} should go.",
                "{name} must not contain the line '{line}' any longer.",
                line=gone[0],
                name=name,
            )
        )
        job.solve(f"sed -i {quote(f'/^{gone[0]}$/d')} {quote(name)}")
    elif job.level == 1:
        word = job.word("person")
        for k in job.rng.sample(range(len(lines)), 2):
            lines[k] += f" with {word}"
        gone = [line for line in lines if word in line]
        job.ask(
            job.phrase(
                "Delete every line of {name} that contains the word '{word}'.",
                "Remove all lines with '{word}' in them from {name}.",
                "Drop the lines of {name} where '{word}' occurs.",
                "No line of {name} should mention '{word}'; delete those that do.",
                "Lines that name '{word}' have no business in {name}. Out with them.",
                name=job.show(name),
                word=word,
            )
        )
        job.solve(f"sed -i {quote(f'/{word}/d')} {quote(name)}")
    else:
        comments = [f"# {line}" for line in job.sentences(3)]
        rest = [f"{key} = {value}" for key, value in zip(job.words("key", 4), job.words("city", 4), strict=True)]
        rest[1] += "  # not a comment line"
        gone = [*comments, *([""] * 2 if job.level == 3 else [])]
        if job.level == 3:
            gone[0] = f"   {gone[0]}"
        lines = [*rest]
        for line in gone:
            lines.insert(job.number(0, len(lines)), line)
        what = "comment lines" if job.level == 2 else "comment lines and all empty lines"
        job.ask(
            job.phrase(
                "Delete all {what} from {name}.",
                "Strip {name} of {what}.",
                "Remove the {what} from {name}.",
                "{name} should be left without {what}.",
                "What remains of {name} must be free of {what}.",
                what=what,
                name=job.show(name),
            )
        )
        start = "starts with #" if job.level == 2 else "starts with #, perhaps after some spaces"
        job.ask(f"A comment line {start}; a # further back in a line is no reason to touch it.")
        job.solve(f"sed -i -e '/^ *#/d' {'-e /^$/d ' if job.level == 3 else ''}{quote(name)}")
    job.put(name, lines)
    job.want_text(name, [line for line in lines if line not in gone], main=True)


def number_lines(job: Job) -> None:
    """A copy with line numbers."""
    job.bystander()
    source, out = job.name(), job.name()
    lines = job.sentences(job.size(4))
    if job.level == 3:
        for k in sorted(job.rng.sample(range(1, len(lines)), 2), reverse=True):
            lines.insert(k, "")
    job.put(source, lines)
    sample = ("1: ", "1. ", "001 ", "1) ")[job.level]
    job.ask(
        job.phrase(
            "Write a copy of {source} to {out} in which each line begins with its number, like '{sample}{first}'.",
            "Number the lines of {source} and save the result as {out}. The first line is: {sample}{first}",
            "Make {out} from {source} with a line number before every line. It starts: {sample}{first}",
            "{out} should be {source} with numbered lines; its first line reads '{sample}{first}'.",
            "Give each line of {source} its number and store that as {out}. Its beginning: {sample}{first}",
            source=job.show(source),
            out=job.show(out),
            sample=sample,
            first=lines[0],
        )
    )
    number, wanted = 0, []
    for line in lines:
        if not line:
            wanted.append("")
            continue
        number += 1
        wanted.append({0: f"{number}: ", 1: f"{number}. ", 2: f"{number:03d} ", 3: f"{number}) "}[job.level] + line)
    if job.level == 2:
        job.ask("Numbers have three digits.")
    if job.level == 3:
        job.ask("Empty lines stay empty and are not counted.")
    program = (
        '{print NR": "$0}',
        '{print NR". "$0}',
        '{printf "%03d %s\\n", NR, $0}',
        '/./{print ++n") "$0} /^$/{print}',
    )[job.level]
    job.solve(f"awk {quote(program)} {quote(source)} > {quote(out)}")
    job.want_text(out, wanted, main=True)
