"""Shell kinds about the text of files: replace, settings, templates, duplicates, line endings.

Each function is one kind and draws one task of `job.level`; see shell_kinds_make for what the levels mean.
"""

import json
from shlex import quote

from legorl.commands.tasks.shell_job import Job, paths


def replace(job: Job) -> None:
    """One text for another, in one file or in many."""
    job.bystander()
    old, new = job.words("city", 2)
    if job.level < 2:
        name = job.name() if job.level == 0 else f"{job.folder()}/{job.name()}"
        lines = job.sentences(4)
        for k in job.rng.sample(range(4), 1 + job.level):
            lines[k] = f"{lines[k]} {old}"
        if job.level == 1:
            lines[0] = f"{old} {old} {lines[0]}"
        job.put(name, lines)
        job.ask(
            job.phrase(
                f"Replace the word {old} with {new} in the file {job.show(name)}."
                if job.level == 0
                else f"Replace every {old} in {job.show(name)} with {new}.",
                f"In {job.show(name)}, change {old} to {new}" + (" everywhere." if job.level else "."),
                f"Change {old} to {new} in {job.show(name)}" + (", wherever it occurs." if job.level else "."),
                f"{job.show(name)} says {old} where it should say {new}. Correct this.",
                f"Wherever {old} stands in {job.show(name)}, it has to be {new}.",
            )
        )
        job.solve(f"sed -i 's/{old}/{new}/g' {quote(name)}")
        job.want_text(name, [line.replace(old, new) for line in lines], main=True)
        return
    folder, extension = job.folder(), job.rng.choice(["txt", "md"])
    if job.level == 3:
        old, new = f"/{old}/{job.word('stem')}/", f"/{new}/{job.word('stem')}/"
        job.ask(
            job.phrase(
                "Every path that begins with {old} in the .{extension} files under {folder} should begin with {new}.",
                "Replace {old} by {new} in all .{extension} files of {folder} and its subfolders.",
                "The folder {old} is now {new}. Update all .{extension} files below {folder}.",
                "In .{extension} files anywhere under {folder}, {old} must become {new}.",
                "{old} was renamed {new}: let each .{extension} file from {folder} downwards say so.",
                old=old,
                extension=extension,
                folder=job.show(folder),
                new=new,
            )
        )
        job.solve(f"find {quote(folder)} -name '*.{extension}' -exec sed -i 's|{old}|{new}|g' {{}} +")
    else:
        job.ask(
            job.phrase(
                "Replace the whole word {old} with {new} in all .{extension} files in {folder}.",
                "In each .{extension} file of {folder}, change the word {old} to {new}.",
                "Swap the word {old} for {new} in the .{extension} files of the folder {folder}.",
                "The .{extension} files in {folder} should use the word {new} and no longer the word {old}.",
                "As a word, {old} has to give way to {new} in whatever ends in .{extension} in {folder}.",
                old=old,
                new=new,
                extension=extension,
                folder=job.show(folder),
            )
        )
        job.ask(f"Longer words that merely contain {old}, like {old}er, stay.")
        job.solve(f"sed -i 's/\\b{old}\\b/{new}/g' {quote(folder)}/*.{extension}")
    for k in range(3):
        deep = f"{job.folder()}/" if job.level == 3 and k else ""
        pattern = "see {}x and {}y" if job.level == 3 else "from {} to {} again"
        used, lines = pattern.format(old, old), job.sentences(2)
        trap = [] if job.level == 3 else [f"the {old}er was late"]
        name = job.put(f"{folder}/{deep}{job.name(extension)}", [lines[0], used, *trap, lines[1]])
        job.want_text(name, [lines[0], pattern.format(new, new), *trap, lines[1]], main=True)
    job.put(f"{folder}/{job.name('csv')}", f"id,place\n1,{old}\n")


def config(job: Job) -> None:
    """A setting gets a value: plain keys, a section, JSON."""
    job.bystander()
    keys = job.words("key", 5)
    values = [str(job.number(1, 9000)) for _ in keys]
    key, value = keys[2], str(job.number(9001, 9999))

    def ask(where: str) -> str:
        return job.phrase(
            "Set {key} to {value} in {where}.",
            "In {where}, change the value of {key} to {value}.",
            "Change {key} to {value} in {where}.",
            "The setting {key} in {where} should be {value}.",
            "There is a wrong value for {key} in {where}; {value} is right.",
            key=key,
            value=value,
            where=where,
        )

    if job.level == 3:
        name, outer = job.name("json"), job.word("stem")
        inner = dict(zip(keys, map(int, values), strict=True))
        data = {"name": job.word("person"), outer: inner, key: int(values[0])}
        job.put(name, json.dumps(data, indent=2) + "\n")
        job.ask(ask(f"the object {job.show(outer)} of {job.show(name)}"))
        job.ask("Write it as a number. The file has to stay valid JSON with all its other values, in any layout.")
        code = (
            f"import json; p = {name!r}; d = json.load(open(p)); d[{outer!r}][{key!r}] = {value}; "
            "json.dump(d, open(p, 'w'), indent=2)"
        )
        job.solve(f"python3 -c {quote(code)}")
        inner[key] = int(value)
        job.want_json(name, data)
        return
    name = job.name(job.rng.choice(["conf", "ini", "cfg"]))
    if job.level == 2:
        first, second = job.words("stem", 2)
        job.ask(ask(f"the section [{second}] of {job.show(name)}"))
        job.ask("Other sections keep their own value.")
        head = [f"[{first}]", *(f"{k}={v}" for k, v in zip(keys, values, strict=True)), "", f"[{second}]"]
        tail = [f"{keys[0]}={values[1]}", f"{key}={values[3]}", "", f"[{job.word('stem')}]", f"{key}={values[4]}"]
        job.put(name, [*head, *tail])
        job.solve(f"sed -i {quote(f'/^.{second}.$/,/^$/s/^{key}=.*/{key}={value}/')} {quote(name)}")
        job.want_text(name, [*head, tail[0], f"{key}={value}", *tail[2:]], main=True)
        return
    lines = [f"{k}={v}" for k, v in zip(keys, values, strict=True)]
    if job.level == 1:
        lines[0] = f"{key}_{keys[0]}={values[0]}"
        lines.insert(1, f"#{key}={values[1]}")
    job.put(name, lines)
    job.ask(ask(f"the file {job.show(name)}"))
    job.solve(f"sed -i 's/^{key}=.*/{key}={value}/' {quote(name)}")
    job.want_text(name, [f"{key}={value}" if line.startswith(f"{key}=") else line for line in lines], main=True)


def template(job: Job) -> None:
    """Placeholders filled in."""
    job.bystander()
    form = job.name(job.rng.choice(["txt", "md"]) if job.level else "txt")
    person, city, item = job.word("person").title(), job.word("city").title(), job.word("item")
    if job.level == 0:
        lines = ["Dear {{NAME}},", f"{job.sentence()}."]
        job.put(form, lines)
        job.ask(
            job.phrase(
                "In the file {form}, replace {{{{NAME}}}} with {person}.",
                "Replace the placeholder {{{{NAME}}}} in {form} by {person}.",
                "Fill in the placeholder {{{{NAME}}}} in {form}: the name is {person}.",
                "The file {form} has a gap {{{{NAME}}}}. Put {person} there.",
                "Write {person} where {form} says {{{{NAME}}}}.",
                form=form,
                person=person,
            )
        )
        job.solve(f"sed -i 's/{{{{NAME}}}}/{person}/' {quote(form)}")
        job.want_text(form, [line.replace("{{NAME}}", person) for line in lines], main=True)
        return
    lines = [
        "To {{NAME}} in {{CITY}},",
        job.sentence() + ".",
        "your {{ITEM}} will be sent to {{CITY}}.",
        "Yours, {{SENDER}}",
    ]
    job.put(form, lines)
    values = {"NAME": person, "CITY": city, "ITEM": item, "SENDER": job.word("person").title()}
    if job.level < 3:
        out = job.name("txt")
        if job.level == 1:
            given = job.block(f"{k}: {v}" for k, v in values.items())
        else:
            source = job.put(job.name("env"), [f"{k}={v}" for k, v in values.items()])
            given = f" The values stand in {job.show(source)}, one KEY=value a line."
        job.ask(
            job.phrase(
                "{form} is a template with placeholders like {{{{NAME}}}}. Fill them in and write the result to {out}.",
                "Write {out}: it is {form} with every placeholder in double braces replaced by its value.",
                "Make {out} from {form} by putting values in place of {{{{NAME}}}} and the other placeholders.",
                "Fill the template {form} and save the letter as {out}; keep the template.",
                "From the template {form} (gaps look like {{{{NAME}}}}) produce the finished text {out}.",
                form=job.show(form),
                out=job.show(out),
            )
            + (" Use these values:" if job.level == 1 else "")
            + given
        )
        script = "; ".join(f"s/{{{{{k}}}}}/{v}/g" for k, v in values.items())
        job.solve(f"sed {quote(script)} {quote(form)} > {quote(out)}")
        job.want_text(out, _fill(lines, values), main=True)
        return
    people = [
        dict(values, NAME=n.title(), CITY=c.title())
        for n, c in zip(job.words("person", 3), job.words("city", 3), strict=True)
    ]
    source = job.put(job.name("csv"), ["NAME,CITY,ITEM,SENDER", *(",".join(p[k] for k in values) for p in people)])
    folder = job.folder()
    job.ask(
        job.phrase(
            "Write one letter a row of {source} into the new folder {folder}, from the template {form}.",
            "Fill the template {form} once for each row of {source}; the letters go to a new folder {folder}.",
            "For each data row of {source}, make a letter in {folder} out of the template {form}.",
            "Use {form} as a template and produce a letter for every row of {source} in the folder {folder}.",
            "{source} lists letters, {form} is their template; the finished ones belong in {folder}.",
            source=job.show(source),
            folder=job.show(folder),
            form=job.show(form),
        )
    )
    job.ask(
        "Placeholders are the column names in double braces. A letter is named after the NAME in its row, plus .txt."
    )
    code = (
        "import csv, sys, pathlib; out = pathlib.Path(sys.argv[3]); out.mkdir()\n"
        "for row in csv.DictReader(open(sys.argv[1])):\n"
        "    text = open(sys.argv[2]).read()\n"
        "    for k, v in row.items(): text = text.replace('{{' + k + '}}', v)\n"
        "    (out / (row['NAME'] + '.txt')).write_text(text)"
    )
    job.solve(f"python3 -c {quote(code)} {paths(source, form, folder)}")
    for row in people:
        job.want_text(f"{folder}/{row['NAME']}.txt", _fill(lines, row), main=True)


def _fill(lines: list[str], values: dict[str, str]) -> str:
    text = "\n".join(lines)
    for key, value in values.items():
        text = text.replace("{{" + key + "}}", value)
    return text


def dedupe(job: Job) -> None:
    """Repeated lines or settings away, order kept."""
    job.bystander()
    name = job.name("conf" if job.level >= 2 else "txt")
    if job.level < 2:
        lines = job.words("item", 5)
        doubled = [*lines]
        if job.level == 0:
            doubled.insert(3, doubled[2])
            job.ask(f"In the file {name}, one line stands twice in a row. Delete the second of the two.")
            job.solve(f"uniq {quote(name)} > {quote(name)}.new && mv {quote(name)}.new {quote(name)}")
        else:
            doubled += [lines[1], lines[3]]
            job.ask(f"Remove repeated lines from {job.show(name)}. Keep the first of each and do not change the order.")
            job.solve(f"awk '!seen[$0]++' {quote(name)} > {quote(name)}.new && mv {quote(name)}.new {quote(name)}")
        job.put(name, doubled)
        job.want_text(name, lines, main=True)
        return
    keys, values = job.words("key", 4), job.words("city", 7)
    lines = [f"{k}={v}" for k, v in zip(keys, values, strict=False)]
    late = [f"{keys[0]}={values[4]}", f"{keys[2]}={values[5]}"]
    note = [f"# {job.sentence()}"] * (2 if job.level == 3 else 0)
    job.put(name, [*note[:1], *lines, *note[1:], *late])
    job.ask(f"Some keys are set more than once in {job.show(name)}, and the program obeys the last setting.")
    job.ask("Delete the settings that have no effect; the others stay where they are.")
    if note:
        job.ask("Comment lines (they start with #) all stay, even if two are alike.")
    program = '/^#/{print; next} {split($0, p, "="); if (!seen[p[1]]++) print}'
    job.solve(
        f"tac {quote(name)} | awk {quote(program)} | tac > {quote(name)}.new && mv {quote(name)}.new {quote(name)}"
    )
    job.want_text(name, [*note[:1], lines[1], lines[3], *note[1:], *late], main=True)


def line_endings(job: Job) -> None:
    """CRLF to LF, or back."""
    job.bystander()
    folder = "" if job.level < 2 else job.folder() + "/"
    names = [folder + job.name() for _ in range((1, 2, 3, 3)[job.level])]
    back = job.level == 3
    shown = " and ".join(map(job.show, names))
    if job.level < 2:
        job.ask(f"Convert {shown} from Windows line endings (CRLF) to Unix line endings (LF).")
        job.solve(f"sed -i 's/\\r$//' {paths(*names)}")
    elif job.level == 2:
        job.ask(
            f"All .txt files in {job.show(folder)} should end their lines with LF instead of CRLF. Other files stay."
        )
        job.solve(f"sed -i 's/\\r$//' {quote(folder)}*.txt")
        job.put(f"{folder}{job.name('bat')}", "@echo off\r\n")
    else:
        job.ask(f"Give the .txt files in {job.show(folder)} Windows line endings: every line ends in CRLF.")
        job.ask("Some lines have CRLF already; no line may end in two carriage returns.")
        job.solve(f"sed -i 's/\\r*$/\\r/' {quote(folder)}*.txt")
    for name in names:
        lines = job.sentences(3)
        old = "\n".join(lines) + "\n" if back else "\r\n".join(lines) + "\r\n"
        if back:
            old = old.replace("\n", "\r\n", 1)
        job.put(name, old)
        job.want_bytes(name, "".join(line + ("\r\n" if back else "\n") for line in lines).encode())
