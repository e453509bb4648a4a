"""Shell kinds that make files and folders: with given lines, empty, as a layout, as an archive.

Each function is one kind and draws one task of `job.level`: 0 is one obvious command with every name given, 1 adds
company, 2 sets of files and names with spaces, 3 rules instead of lists, accents, traps.
"""

import gzip
import io
import tarfile
from shlex import quote

from legorl.commands.tasks.shell_job import Job, paths, printf

TRICKY = (
    "the price is $5 and not $HOME",
    "say `hello` to everyone",
    'she said "good morning" twice',
    "it's a trap; don't fall in",
    "100% of *.txt files & more",
    "a backslash \\ and a tab are not the same",
)


def create(job: Job) -> None:
    """A file with given lines."""
    job.bystander()
    if job.level == 0:
        name, line = job.name(), f"{job.word('adjective')} {job.word('noun')}"
        job.ask(
            job.phrase(
                "Create a file named {name} that contains the line: {line}",
                "Make a new file called {name} with this one line in it: {line}",
                "Write the text '{line}' to the file {name}.",
                "Put the line '{line}' into a new file {name}.",
                "A file {name} is needed. Its only line shall read: {line}",
                "Please store the words '{line}' in a file with the name {name}.",
                name=name,
                line=line,
            )
        )
        job.solve(f"{printf([line])} > {quote(name)}")
        job.want_text(name, line, main=True)
        return
    lines = job.sentences({1: 2, 2: 3, 3: 3}[job.level])
    name = job.name(job.rng.choice(["txt", "md"]))
    if job.level >= 2:
        folder = job.folder()
        job.solve(f"mkdir -p {quote(folder)}")
        name = f"{folder}/{name}"
    if job.level == 3:
        lines[1:1] = job.rng.sample(TRICKY, 2)
    job.ask(
        job.phrase(
            "Create the file {name} with exactly these lines:",
            "Write a new file {name}. It should contain the following lines:",
            "I need a file {name} with this content:",
            "Please make {name} and put these lines into it, in this order:",
            "Let {name} be a new file that reads as follows:",
            name=job.show(name),
        )
        + job.block(lines)
    )
    job.solve(f"{printf(lines)} > {quote(name)}")
    job.want_text(name, lines, main=True)


def empty(job: Job) -> None:
    """Files of no bytes."""
    job.bystander()
    names = [job.name(job.rng.choice(["txt", "log", "csv"])) for _ in range((1, 2, 2, 3)[job.level])]
    if job.level >= 2:
        folder = job.folder()
        job.solve(f"mkdir -p {quote(folder)}")
        names = [f"{folder}/{name}" for name in names]
    if job.level == 0:
        job.ask(
            job.phrase(
                "Create an empty file named {name}.",
                "Make an empty file called {name}.",
                "Use touch to create the empty file {name}.",
                "Add a new file {name} with nothing in it.",
                "There should be a file {name} of zero bytes; please create it.",
                name=names[0],
            )
        )
    else:
        shown = ", ".join(map(job.show, names))
        job.ask(
            job.phrase(
                "Create these empty files: {shown}.",
                "Make the following files, each with no content at all: {shown}.",
                "Please add empty files named {shown}.",
                "We need placeholders of zero bytes: {shown}.",
                "Each of {shown} has to exist afterwards and be empty.",
                shown=shown,
            )
        )
    job.solve(f"touch {paths(*names)}")
    for name in names:
        job.want_bytes(name, b"")


def mkdir(job: Job) -> None:
    """Folders; git keeps no empty ones, so each gets a file."""
    job.bystander()
    folders = [job.folder() for _ in range((1, 1, 3, 3)[job.level])]
    if job.level == 1:
        folders = ["/".join([folders[0], job.folder(), job.folder()])]
    if job.level == 3:
        folders = [f"{job.folder()}/{f}" for f in folders]
    marker = job.name() if job.level == 0 else job.rng.choice([".keep", ".gitkeep", "README"])
    if len(folders) == 1:
        job.ask(
            job.phrase(
                "Make a directory named {folder} and create an empty file {marker} in it.",
                "Create the folder {folder} with an empty file {marker} inside.",
                "Add a new folder {folder} that holds one empty file called {marker}.",
                "We want a directory {folder} which contains an empty file {marker}.",
                "Set up the directory {folder}; an empty file named {marker} belongs in it.",
                folder=job.show(folders[0]),
                marker=job.show(marker),
            )
        )
    else:
        shown = ", ".join(map(job.show, folders))
        job.ask(
            job.phrase(
                "Create the folders {shown}, each with an empty file {marker} in it.",
                "Make these directories: {shown}. Put an empty {marker} into each of them.",
                "Please set up {shown} as folders and keep each alive with an empty file {marker}.",
                "Three new directories are wanted: {shown}. An empty {marker} goes into every one.",
                "Every one of the directories {shown} has to exist and to hold an empty file {marker}.",
                shown=shown,
                marker=job.show(marker),
            )
        )
    job.solve(f"mkdir -p {paths(*folders)} && touch {paths(*(f'{f}/{marker}' for f in folders))}")
    for folder in folders:
        job.want_bytes(f"{folder}/{marker}", b"")


def tree(job: Job) -> None:
    """A given layout of folders and one-line files."""
    job.bystander()
    top = job.folder(plain=True)
    layout = {}
    for _ in range((1, 2, 2, 3)[job.level]):
        folder = top if job.level == 0 else f"{top}/{job.folder()}"
        for _ in range((2, 1, 2, 2)[job.level]):
            layout[f"{folder}/{job.name()}"] = job.word("city") if job.level < 3 else job.sentence()
    if job.level == 0:
        (one, first), (two, second) = layout.items()
        job.ask(
            job.phrase(
                "Make the folder {top} with two files: {one} has the line {first}, {two} has the line {second}.",
                "Create the directory {top}. Put the word {first} into {one} and the word {second} into {two}.",
                "Create {one} with the line {first} and {two} with the line {second}. The folder {top} is new.",
                "A new folder {top} should hold {one} with the word {first} and {two} with the word {second}.",
                "Let there be a folder {top}, in it {one} that says {first} and {two} that says {second}.",
                top=top,
                one=one,
                first=first,
                two=two,
                second=second,
            )
        )
    else:
        shown = [f"{path}: {line}" for path, line in layout.items()]
        job.ask(
            job.phrase(
                "Create these files with their folders. After the colon stands the one line that each file contains:",
                "Build the following tree. Each entry is a path, a colon, and the file's only line:",
                "Please lay out these files; what follows the colon is the content of the file, one line:",
                "Make the folders and files listed here (path: content, a single line each):",
                "The list names files and the line that each of them shall hold. Create all of them, folders included:",
            )
            + job.block(shown)
        )
    folders = dict.fromkeys(path.rpartition("/")[0] for path in layout)
    job.solve(f"mkdir -p {paths(*folders)}")
    for path, line in layout.items():
        job.solve(f"{printf([line])} > {quote(path)}")
        job.want_text(path, line)


def pack(job: Job) -> None:
    """An archive of a folder."""
    job.bystander()
    folder = job.folder()
    names = [f"{folder}/{job.name()}", f"{folder}/{job.name()}", f"{folder}/{job.folder()}/{job.name('md')}"]
    out = job.name("tar" if job.level == 0 else "tar.gz")
    contents = {name: "".join(f"{line}\n" for line in job.sentences(2)) for name in names}
    for name, content in contents.items():
        job.put(name, content)
    what, options, rest = f"the folder {job.show(folder)}", f"{quote(folder)}", ""
    if job.level == 2:
        job.put(f"{folder}/{job.name('tmp')}", job.sentences(1))
        options, rest = f"--exclude='*.tmp' {quote(folder)}", " Leave .tmp files out."
    if job.level == 3:
        options, rest = (
            f"-C {quote(folder)} .",
            f" The paths in the archive shall begin inside the folder, without {job.show(folder + '/')}.",
        )
        contents = {name.removeprefix(f"{folder}/"): content for name, content in contents.items()}
    kind = "tar archive" if job.level == 0 else "gzip-compressed tar archive"
    job.ask(
        job.phrase(
            "Pack {what} into a {kind} named {out}.",
            "Create the {kind} {out} from {what}.",
            "Make a {kind} {out} of {what} with all that is in it.",
            "Put {what} with its contents into the {kind} {out}; keep the folder.",
            "{out} shall be a {kind} with {what} in it.",
            what=what,
            kind=kind,
            out=job.show(out),
        )
        + rest
    )
    job.solve(f"tar -c{'' if job.level == 0 else 'z'}f {quote(out)} {options}")
    job.test(
        f"contents of {out}",
        f"with tarfile.open({out!r}, 'r:{'' if job.level == 0 else 'gz'}') as tar:",
        "    files = {m.name.removeprefix('./'): tar.extractfile(m).read().decode() for m in tar if m.isfile()}",
        f"assert files == {contents!r}",
    )


def unpack(job: Job) -> None:
    """Files out of an archive."""
    job.bystander()
    inner = job.folder()
    names = [f"{inner}/{job.name()}", f"{inner}/{job.name()}", f"{inner}/{job.name('csv')}"]
    contents = {name: "".join(f"{line}\n" for line in job.sentences(2)) for name in names}
    archive = job.put(job.name("tar" if job.level == 0 else "tar.gz"), _tar(contents, compress=job.level > 0))
    if job.level < 2:
        target = "" if job.level == 0 else job.folder() + "/"
        where = "here, in the current folder" if not target else f"into the new folder {job.show(target)}"
        job.ask(
            job.phrase(
                "Extract the archive {archive} {where}.",
                "Unpack {archive} {where}.",
                "Please unpack the tar archive {archive} {where}. Keep the archive.",
                "Take the files out of {archive} and put them {where}.",
                "What is in {archive} has to be unpacked {where}.",
                archive=job.show(archive),
                where=where,
            )
        )
        job.solve(
            f"tar -xf {quote(archive)}"
            if not target
            else f"mkdir -p {quote(target)} && tar -xzf {quote(archive)} -C {quote(target)}"
        )
        for name, content in contents.items():
            job.want_text(target + name, content, main=True)
        return
    pick, out = job.rng.choice(names), job.name()
    if job.level == 2:
        job.ask(
            job.phrase(
                "Extract only {pick} from {archive} and save it as {out}.",
                "Get the one file {pick} out of {archive}; write it to {out}.",
                "Take {pick} from the archive {archive} and store its content as {out}.",
                "Of all files in {archive}, only {pick} is wanted, under the name {out}.",
                "{out} shall be what {archive} holds as {pick}; unpack nothing else.",
                pick=job.show(pick),
                archive=job.show(archive),
                out=job.show(out),
            )
        )
        job.solve(f"tar -xzOf {quote(archive)} {quote(pick)} > {quote(out)}")
        job.want_text(out, contents[pick], main=True)
    else:
        job.ask(
            job.phrase(
                "Write a list of the files in {archive} to {out}, one path a line, without unpacking it.",
                "Which files does {archive} contain? Save their paths in {out}, one a line; do not unpack.",
                "List the contents of {archive} in {out}, a path on each line, and unpack nothing.",
                "Put the paths of the files packed in {archive} into {out}, line by line. Unpack nothing.",
                "{out} shall name, line by line, the files that are packed in {archive}. It stays packed.",
                archive=job.show(archive),
                out=job.show(out),
            )
        )
        job.ask("The order does not matter.")
        job.solve(f"tar --quoting-style=literal -tzf {quote(archive)} > {quote(out)}")
        job.want_lines(out, contents)
    job.test("nothing else is unpacked", f"assert not os.path.exists({inner!r})", before=True)


def _tar(contents: dict[str, str], compress: bool) -> bytes:
    """Return a reproducible tar archive of text files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, content in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(content.encode())
            tar.addfile(info, io.BytesIO(content.encode()))
    return gzip.compress(buffer.getvalue(), mtime=0) if compress else buffer.getvalue()
