"""Shell kinds that read files and write an answer: search, count, pick lines, find files.

Each function is one kind and draws one task of `job.level`; see shell_kinds_make for what the levels mean. Answers
are judged by content: numbers without regard to white space, lists of names in any order.
"""

from shlex import quote

from legorl.commands.tasks.shell_job import Job, paths

ONLY_NUMBER = "Write only the number."


def search(job: Job) -> None:
    """Lines, or files, that contain a word."""
    job.bystander()
    word = job.word("person")
    out = job.name()
    if job.level < 2:
        source = job.name("txt" if job.level == 0 else "log")
        lines = job.sentences(job.size(6))
        hits = sorted(job.rng.sample(range(len(lines)), 2 + job.level))
        for k in hits:
            shown = job.rng.choice([word, word.upper(), word.title()]) if job.level == 1 else word
            lines[k] = f"{lines[k]} with {shown}"
        job.put(source, lines)
        case = " in capital or small letters" if job.level == 1 else ""
        job.ask(
            job.phrase(
                "Find the lines in {source} that contain {word}{case} and write them to {out}.",
                "Search {source} for {word}{case}. Save the matching lines in {out}.",
                "Write all lines of {source} with the word {word}{case} to the file {out}.",
                "Collect the lines that mention {word}{case}: take them from {source}, put them into {out}.",
                "{out} shall hold those lines of {source} in which {word}{case} is named.",
                source=job.show(source),
                word=word,
                case=case,
                out=job.show(out),
            )
        )
        job.solve(f"grep {'-i ' if job.level == 1 else ''}{word} {quote(source)} > {quote(out)}")
        job.want_text(out, [lines[k] for k in hits], main=True)
        return
    folder = job.folder()
    needle = word if job.level == 2 else f"[{word}.{job.word('item')}]"
    names = [f"{folder}/{job.name()}", f"{folder}/{job.folder()}/{job.name('log')}", f"{folder}/{job.name('md')}"]
    for name in names:
        lines = job.sentences(3)
        lines[job.number(0, 2)] += f" for {needle}"
        job.put(name, lines)
    job.put(f"{folder}/{job.name()}", [*job.sentences(2), f"see {needle[1:-1].replace('.', '-')}"])
    job.ask(
        job.phrase(
            "Which files under {folder} contain the text {needle}? Write their paths to {out}, one a line.",
            "List in {out} all files in {folder} and its subfolders that contain {needle}, one path a line.",
            "Search {folder} recursively for {needle} and save the paths of the matching files in {out}.",
            "Put the paths of all files below {folder} in which {needle} occurs into {out}.",
            "{needle} occurs in some files of {folder}, at any depth. Their paths belong in {out}.",
            folder=job.show(folder),
            needle=job.show(needle),
            out=job.show(out),
        )
    )
    job.ask(
        f"A path begins with {job.show(folder + '/')}; the order does not matter."
        + (" It is plain text, not a pattern." if job.level == 3 else "")
    )
    job.solve(f"grep -rlF {quote(needle)} {quote(folder)} > {quote(out)}")
    job.want_lines(out, names)


def count_lines(job: Job) -> None:
    """How many lines."""
    job.bystander()
    out = job.name()
    if job.level < 2:
        lines = job.sentences(job.number(4, 9))
        total = len(lines)
        if job.level == 1:
            for _ in range(job.number(2, 4)):
                lines.insert(job.number(1, len(lines)), "")
        source = job.put(job.name(), lines)
        what = "lines" if job.level == 0 else "lines that are not empty"
        job.ask(
            job.phrase(
                "Count the {what} in {source} and write the number to {out}.",
                "How many {what} does {source} have? Write the number to the file {out}.",
                "Write the number of {what} of {source} into {out}.",
                "Save in {out} how many {what} there are in {source}.",
                "{out} shall tell the count of {what} in {source}.",
                what=what,
                source=job.show(source),
                out=job.show(out),
            )
        )
        job.ask(ONLY_NUMBER)
        job.solve(
            f"wc -l < {quote(source)} > {quote(out)}" if job.level == 0 else f"grep -c . {quote(source)} > {quote(out)}"
        )
        job.want_number(out, total)
        return
    folder = job.folder()
    counts = {}
    for k in range(3):
        deep = f"{job.folder()}/" if job.level == 3 and k else ""
        name = f"{folder}/{deep}{job.name('log')}"
        counts[name] = job.number(2, 7)
        job.put(name, job.sentences(counts[name]))
    job.bystander("txt", folder=f"{folder}/")
    if job.level == 2:
        job.ask(
            job.phrase(
                "How many lines do the .log files in {folder} have all together? Write the number to {out}.",
                "Write the total number of lines of all .log files in {folder} to {out}.",
                "Count the lines of every .log file in {folder} and save the sum in {out}.",
                "Add up the line counts of the .log files in {folder}; the sum goes to {out}.",
                "Taken together, the .log files in {folder} have how many lines? {out} shall say it.",
                folder=job.show(folder),
                out=job.show(out),
            )
        )
        job.ask(ONLY_NUMBER)
        job.solve(f"cat {quote(folder)}/*.log | wc -l > {quote(out)}")
        job.want_number(out, sum(counts.values()))
        return
    job.ask(
        job.phrase(
            "For each .log file under {folder}, at any depth, write 'PATH: COUNT' to {out}, COUNT being its lines.",
            "Make {out}: for every .log file below {folder} its path, a colon, a space and its number of lines.",
            "Write to {out} how many lines the .log files under {folder} have, subfolders too, as 'PATH: COUNT'.",
            "List every .log file below {folder} with its number of lines in {out}, as 'PATH: COUNT'.",
            "{out} shall name each .log file from {folder} down and its line count, in the form 'PATH: COUNT'.",
            folder=job.show(folder),
            out=job.show(out),
        )
    )
    job.ask(f"Paths begin with {job.show(folder + '/')}; the order does not matter.")
    job.solve(
        f'find {quote(folder)} -name \'*.log\' | while read -r f; do echo "$f: $(wc -l < "$f")"; done > {quote(out)}'
    )
    job.want_lines(out, [f"{name}: {count}" for name, count in counts.items()])


def count_words(job: Job) -> None:
    """How many words."""
    job.bystander()
    out = job.name()
    names = [job.put(job.name(), job.sentences(job.number(2, 6))) for _ in range((1, 2, 1, 3)[job.level])]
    texts = [job.files[name].body.decode() for name in names]
    if job.level == 2:
        half = texts[0].split("\n")[:2]
        job.ask(
            job.phrase(
                "How many words do the first two lines of {name} have together? Write the number to {out}.",
                "Count the words in lines 1 and 2 of {name} and write the number to {out}.",
                "Write the number of words in the first two lines of {name} into {out}.",
                "Save in {out} how many words stand in the first two lines of {name}.",
                "Lines one and two of {name}: their words, counted, are what {out} shall say.",
                name=job.show(names[0]),
                out=job.show(out),
            )
        )
        job.solve(f"head -n 2 {quote(names[0])} | wc -w > {quote(out)}")
        total = len(" ".join(half).split())
    elif job.level == 3:
        total = max(len(text.split()) for text in texts)
        job.ask(
            job.phrase(
                "Which of {shown} has the most words? Write how many words that file has to {out}.",
                "Count the words of {shown} and write the largest of the three counts to {out}.",
                "Write to {out} the word count of the file with the most words among {shown}.",
                "Of {shown}, find the one with the most words; its word count goes to {out}.",
                "{shown}: the greatest word count among them shall be in {out}.",
                shown=", ".join(map(job.show, names)),
                out=job.show(out),
            )
        )
        job.solve(f'for f in {paths(*names)}; do wc -w < "$f"; done | sort -n | tail -n 1 > {quote(out)}')
    else:
        shown = " and ".join(map(job.show, names))
        together = " together" if len(names) > 1 else ""
        job.ask(
            job.phrase(
                "Count the words in {shown}{together} and write the number to {out}.",
                "How many words are in {shown}{together}? Write the number to {out}.",
                "Write the number of words of {shown}{together} into the file {out}.",
                "Save in {out} how many words {shown}{together} contain.",
                "The word count of {shown}{together} shall stand in {out}.",
                shown=shown,
                together=together,
                out=job.show(out),
            )
        )
        job.solve(
            f"wc -w < {quote(names[0])} > {quote(out)}"
            if len(names) == 1
            else f"cat {paths(*names)} | wc -w > {quote(out)}"
        )
        total = len(" ".join(texts).split())
    job.ask(ONLY_NUMBER)
    job.want_number(out, total)


def count_matches(job: Job) -> None:
    """How many lines, or places, hold a word."""
    job.bystander()
    out, word = job.name(), job.word("item")
    folder = job.folder() + "/" if job.level >= 2 else ""
    total, sources = 0, []
    for _ in range(3 if job.level >= 2 else 1):
        source = folder + job.name("log")
        lines = job.sentences(job.number(5, 9))
        for k in job.rng.sample(range(len(lines)), job.number(2, 4)):
            times = job.number(1, 2) if job.level in (1, 3) else 1
            lines[k] += f" {word}" * times
            total += times
        sources.append(job.put(source, lines))
    if job.level == 3:
        job.put(f"{folder}{job.name('txt')}", f"{word}\n")
    what = "lines that contain" if job.level in (0, 2) else "occurrences of"
    where = job.show(sources[0]) if job.level < 2 else f"all .log files in {job.show(folder)} together"
    job.ask(
        job.phrase(
            "Count the {what} {word} in {where}. Write the number to {out}.",
            "How many {what} {word} are in {where}? Write the number to {out}.",
            "Write the number of {what} {word} in {where} into the file {out}.",
            "Find out how many {what} {word} there are in {where} and save the number in {out}.",
            "{out} shall say how many {what} {word} one finds in {where}.",
            what=what,
            word=word,
            where=where,
            out=job.show(out),
        )
    )
    job.ask(
        ONLY_NUMBER if job.level in (0, 2) else f"A line may contain {word} twice; that counts as two. {ONLY_NUMBER}"
    )
    files = quote(sources[0]) if job.level < 2 else f"{quote(folder)}*.log"
    job.solve(
        {
            0: f"grep -c {word} {files} > {quote(out)}",
            1: f"grep -o {word} {files} | wc -l > {quote(out)}",
            2: f"cat {files} | grep -c {word} > {quote(out)}",
            3: f"cat {files} | grep -o {word} | wc -l > {quote(out)}",
        }[job.level]
    )
    job.want_number(out, total)


def head_tail(job: Job) -> None:
    """A stretch of lines."""
    job.bystander()
    source, out = job.name(), job.name()
    lines = job.sentences(job.size(7))
    count = job.number(2, 4)
    if job.level == 0:
        side = job.rng.choice(["first", "last"])
        what = f"the {side} {count} lines"
        wanted = lines[:count] if side == "first" else lines[-count:]
        command = f"{'head' if side == 'first' else 'tail'} -n {count}"
    elif job.level == 1:
        start = job.number(2, 4)
        what, wanted, command = (
            f"lines {start} to {start + count}",
            lines[start - 1 : start + count],
            f"sed -n '{start},{start + count}p'",
        )
    elif job.level == 2:
        what = f"all lines but the first {count} and the last"
        wanted, command = lines[count:-1], f"sed '1,{count}d;$d'"
    else:
        marks = [f"== {word} ==" for word in job.words("person", 2)]
        at = job.number(1, 3)
        lines[at:at], wanted = marks[:1], lines[at : at + count]
        lines.insert(at + 1 + count, marks[1])
        what = f"the lines between '{marks[0]}' and '{marks[1]}', without these two,"
        command = f"sed -n {quote(f'/^{marks[0]}$/,/^{marks[1]}$/p')} {quote(source)} | sed '1d;$d'"
    job.put(source, lines)
    job.ask(
        job.phrase(
            "Write {what} of {source} to {out}.",
            "Copy {what} of {source} into the file {out}.",
            "Save {what} of {source} as {out}.",
            "Put {what} of {source} into {out} and keep the source.",
            "{out} shall consist of {what} of {source}.",
            what=what,
            source=job.show(source),
            out=job.show(out),
        )
    )
    job.solve(f"{command} > {quote(out)}" if job.level == 3 else f"{command} {quote(source)} > {quote(out)}")
    job.want_text(out, wanted, main=True)


def find(job: Job) -> None:
    """The paths of files that fit."""
    job.bystander()
    folder, out = job.folder(), job.name()
    extension = job.rng.choice(["txt", "md", "csv"])
    other = job.rng.choice(["log", "html", "py"])
    deep = f"{folder}/{job.folder()}/"
    below = " (subfolders included)" if job.level else ""
    names = [
        f"{place}{job.name(extension)}"
        for place in ([f"{folder}/"] * 3 if job.level == 0 else [f"{folder}/", deep, deep])
    ]
    for k, name in enumerate(names):
        job.put(name, job.sentences(1 if k else 4))
    job.put(f"{folder}/{job.name(other)}", job.sentences(1))
    wanted, what, test = names, f"all .{extension} files in {job.show(folder)}{below}", f"-name '*.{extension}'"
    if job.level == 2:
        empty = [job.put(f"{place}{job.name(extension)}", "") for place in (deep, f"{folder}/")]
        job.put(f"{folder}/{job.name(other)}", "")
        wanted, what, test = (
            empty,
            f"the empty .{extension} files under {job.show(folder)}, at any depth",
            f"-name '*.{extension}' -empty",
        )
    elif job.level == 3:
        start = job.word("person")
        wanted = [
            job.put(f"{place}{start} {job.word('stem')}.{extension}", job.sentences(1))
            for place in (deep, f"{folder}/")
        ]
        job.put(f"{deep}{start} {job.word('stem')}.{other}", job.sentences(1))
        what = f"the files under {job.show(folder)}, at any depth, with a name like {job.show(f'{start}*.{extension}')}"
        test = f"-name {quote(f'{start}*.{extension}')}"
    job.ask(
        job.phrase(
            "Write the paths of {what} to {out}, one path a line.",
            "Find {what}. Save their paths in {out}, one a line.",
            "List {what} in the file {out}: one path on each line.",
            "Make a list of {what} and store it as {out}, a path a line.",
            "{out} shall name {what}; each line is one path.",
            what=what,
            out=job.show(out),
        )
    )
    job.ask(f"A path begins with {job.show(folder + '/')}. The order does not matter.")
    job.solve(
        f"find {quote(folder)} -type f {test} > {quote(out)}"
        if job.level
        else f"ls {quote(folder)}/*.{extension} > {quote(out)}"
    )
    job.want_lines(out, wanted)
