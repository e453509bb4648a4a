"""Shell kinds about whole files: names, places, copies, permissions, links.

Each function is one kind and draws one task of `job.level`; see shell_kinds_make for what the levels mean.
"""

from shlex import quote

from legorl.commands.tasks.shell_job import Job, paths


def rename(job: Job) -> None:
    """A file, or all files of one ending, under a new name."""
    job.bystander()
    if job.level == 3:
        folder = job.folder()
        old, new = job.rng.sample(["txt", "md", "text", "dat", "log"], 2)
        stems = [job.name("") for _ in range(4)]
        job.ask(
            job.phrase(
                "In the folder {folder}, rename every .{old} file so that it ends in .{new} instead.",
                "All files in {folder} with the ending .{old} should get the ending .{new}.",
                "Change the extension of the .{old} files in {folder} to .{new}.",
                "Please turn .{old} into .{new} in the names of the files in {folder}.",
                "The files in {folder} that end in .{old} shall end in .{new}; their content stays.",
                folder=job.show(folder),
                old=old,
                new=new,
            )
        )
        job.solve(f'for f in {quote(folder)}/*.{old}; do mv -- "$f" "${{f%.{old}}}.{new}"; done')
        for stem in stems:
            lines = job.sentences(2)
            job.put(f"{folder}/{stem}.{old}", lines)
            job.want_gone(f"{folder}/{stem}.{old}")
            job.want_text(f"{folder}/{stem}.{new}", lines, main=True)
        job.put(f"{folder}/{job.name('csv', plain=True)}", "a,b\n1,2\n")
        return
    lines = job.sentences(2)
    old, new = job.name(), job.name()
    if job.level >= 1:
        folder = job.folder()
        old, new = f"{folder}/{old}", f"{folder}/{new}"
        job.put(f"{folder}/old-{new.rpartition('/')[2]}", job.sentences(1))
    job.put(old, lines)
    job.ask(
        job.phrase(
            "Rename the file {old} to {new}.",
            "Rename {old} to {new}.",
            "The file {old} should be called {new}. Rename it.",
            "Give the file {old} the new name {new}.",
            "{old} has the wrong name: it has to be {new}.",
            old=job.show(old),
            new=job.show(new),
        )
    )
    job.solve(f"mv {paths(old, new)}")
    job.want_gone(old)
    job.want_text(new, lines, main=True)


def move(job: Job) -> None:
    """Files into another folder."""
    target = job.folder()
    job.bystander(folder=f"{target}/")
    extension = job.rng.choice(["log", "csv", "md"])
    source = "" if job.level < 2 else job.folder() + "/"
    names = [job.name(extension) for _ in range((1, 2, 3, 4)[job.level])]
    if job.level < 2:
        shown = " and ".join(map(job.show, names))
        job.bystander()
        job.ask(
            job.phrase(
                "Move {shown} into the folder {target}.",
                "Move {shown} to the directory {target}.",
                "Put {shown} into the existing folder {target} (move, do not copy).",
                "{shown} should be moved into {target}.",
                "The place of {shown} is in the folder {target}, not here. Move what has to be moved.",
                shown=shown,
                target=job.show(target),
            )
        )
        job.solve(f"mv {paths(*names)} {quote(target)}/")
    else:
        job.bystander(folder=source)
        deep = job.level == 3
        if deep:
            inner = job.folder()
            names[2:] = [f"{inner}/{name}" for name in names[2:]]
        where = f"in {job.show(source)}" + (" and the folders below it" if deep else "")
        job.ask(
            job.phrase(
                "Move all .{extension} files {where} directly into {target}.",
                "Every file {where} whose name ends in .{extension} should be moved to {target}, no subfolders.",
                "Collect the .{extension} files {where}: move them straight into {target}.",
                "Please clear up: what ends in .{extension} {where} goes straight into {target}.",
                "{target} is where .{extension} files live. Move those {where} there, all side by side.",
                extension=extension,
                where=where,
                target=job.show(target),
            )
        )
        if deep:
            job.solve(f"find {quote(source)} -name '*.{extension}' -exec mv -t {quote(target)} {{}} +")
        else:
            job.solve(f"mv {quote(source)}*.{extension} {quote(target)}/")
    for name in names:
        lines = job.sentences(1)
        job.put(source + name, lines)
        job.want_gone(source + name)
        job.want_text(f"{target}/{name.rpartition('/')[2]}", lines, main=True)


def copy(job: Job) -> None:
    """A file or a folder twice."""
    job.bystander()
    if job.level < 2:
        old, new = job.put(job.name(), lines := job.sentences(2)), job.name()
        if job.level == 1:
            new = f"{job.folder()}/{new}"
            job.solve(f"mkdir -p {quote(new.rpartition('/')[0])}")
        job.ask(
            job.phrase(
                "Copy the file {old} to {new}.",
                "Copy {old} to {new}.",
                "Make a copy of {old} named {new}.",
                "Duplicate {old}; the duplicate is called {new}.",
                "A second file {new} with the content of {old} is wanted; keep the first.",
                old=job.show(old),
                new=job.show(new),
            )
        )
        job.solve(f"cp {paths(old, new)}")
        job.want_text(new, lines, main=True)
        return
    old, new = job.folder(), job.folder()
    names = [job.name(), f"{job.folder()}/{job.name('csv')}", job.name("md")]
    skip = job.level == 3
    job.ask(
        job.phrase(
            "Copy the folder {old} with everything in it to {new}.",
            "Make a full copy of the directory {old} and call the copy {new}.",
            "Please duplicate {old}, including its subfolders, as {new}.",
            "{new} should become a copy of the whole folder {old}.",
            "Whatever is in {old}, at any depth, has to be in a new folder {new} as well.",
            old=job.show(old),
            new=job.show(new),
        )
    )
    job.solve(f"cp -r {paths(old, new)}")
    if skip:
        job.ask(
            job.phrase(
                "The copy must not contain any .bak file.",
                "Leave the .bak files out of the copy.",
                "Files ending in .bak are not wanted in the copy.",
                "Do not copy .bak files.",
                "Backups (names ending in .bak) stay out of the new folder.",
            )
        )
        job.solve(f"find {quote(new)} -name '*.bak' -delete")
        bak = [f"{name.rpartition('.')[0]}.bak" for name in names[:2]]
        for name in bak:
            job.put(f"{old}/{name}", job.sentences(1))
    for name in names:
        lines = job.sentences(2)
        job.put(f"{old}/{name}", lines)
        job.want_text(f"{new}/{name}", lines, main=True)
    if skip:
        copied = [f"{new}/{name}" for name in bak]
        job.test("no backups copied", f"assert not any(os.path.exists(name) for name in {copied!r})", before=True)


def delete(job: Job) -> None:
    """Files away, by name or by rule."""
    if job.level < 2:
        names = [job.put(job.name(), job.sentences(1)) for _ in range(job.level + 1)]
        for _ in range(job.level + 1):
            job.bystander()
        shown = " and ".join(map(job.show, names))
        job.ask(
            job.phrase(
                f"Delete the file {shown}." if job.level == 0 else f"Delete {shown}.",
                f"Remove {shown}.",
                f"Please delete {shown}, which we no longer need.",
                f"Get rid of {shown}.",
                f"{shown} must not exist any more.",
            )
        )
        job.solve(f"rm {paths(*names)}")
        job.want_gone(*names)
        return
    folder, inner = job.folder(), job.folder()
    places = [f"{folder}/", f"{folder}/{inner}/", f"{folder}/{inner}/{job.folder()}/"]
    if job.level == 2:
        ending = job.rng.choice(["tmp", "bak", "old"])
        job.ask(
            job.phrase(
                "Delete all .{ending} files in {folder} and in every folder below it.",
                "Remove every file whose name ends in .{ending} anywhere under {folder}.",
                "Clean {folder} of .{ending} files, subfolders included.",
                "No .{ending} file should be left in {folder}, at whatever depth.",
                "Files ending in .{ending} are rubbish: wipe them out from {folder} downwards.",
                ending=ending,
                folder=job.show(folder),
            )
        )
        job.solve(f"find {quote(folder)} -name '*.{ending}' -type f -delete")
        gone = [job.put(f"{place}{job.name(ending)}", job.sentences(1)) for place in places]
        job.put(f"{folder}/{job.word('stem')}.{ending}.txt", job.sentences(1))
    else:
        job.ask(
            job.phrase(
                "Delete every empty file (zero bytes) in {folder} and the folders below it.",
                "Remove all files of size zero under {folder}, at any depth.",
                "Some files under {folder} have no content at all. Delete those, wherever they are.",
                "Clear {folder} and its subfolders of files that hold not a single byte.",
                "What is empty goes: remove each zero-byte file from {folder} down.",
                folder=job.show(folder),
            )
        )
        job.solve(f"find {quote(folder)} -type f -empty -delete")
        gone = [job.put(f"{place}{job.name()}", "") for place in places]
        job.put(f"{folder}/{job.name()}", "\n")  # one byte: not empty
    for place in places:
        job.put(f"{place}{job.name()}", job.sentences(1))
    job.want_gone(*gone)


def executable(job: Job) -> None:
    """The executable bit on scripts."""
    script = "#!/bin/sh\necho {}\n"
    ending = ("sh", "sh", "sh", "")[job.level]
    folder = "" if job.level < 1 else job.folder() + "/"
    scripts = [f"{folder}{job.name(ending)}" for _ in range((1, 2, 3, 3)[job.level])]
    others = [job.put(f"{folder}{job.name('txt')}", job.sentences(1))]
    if job.level == 2:
        scripts[2] = f"{folder}{job.folder()}/{scripts[2].rpartition('/')[2]}"
    for name in scripts:
        job.put(name, script.format(job.word("city")))
    shown = " and ".join(map(job.show, scripts))
    if job.level < 2:
        job.ask(
            job.phrase(
                f"Make {shown} executable.",
                f"Make the script {shown} executable." if job.level == 0 else f"Give {shown} the executable bit.",
                f"Set the executable permission on {shown}.",
                f"It should be possible to run {shown} directly; add the missing permission.",
                f"{shown} cannot be started because of missing execute permission. Mend that.",
            )
        )
        job.solve(f"chmod +x {paths(*scripts)}")
    elif job.level == 2:
        job.ask(
            job.phrase(
                "Make all .sh files under {folder} executable, subfolders included, and no other file.",
                "Every script ending in .sh below {folder}, at any depth, needs the executable bit. Only those.",
                "Set execute permission on each .sh file in {folder} and its subfolders, on nothing else.",
                "In {folder} and below, .sh files shall be executable and all other files shall not.",
                "Let every *.sh from {folder} downwards be runnable; other files stay without the bit.",
                folder=job.show(folder),
            )
        )
        job.solve(f"find {quote(folder)} -name '*.sh' -exec chmod +x {{}} +")
    else:
        others.append(job.put(f"{folder}{job.name('')}", [job.sentence(), "#!/bin/sh"]))
        job.ask(
            job.phrase(
                "Some files in {folder} are scripts: their first line begins with #!. Make exactly those executable.",
                "Make each file in {folder} executable if it starts with the characters #!, and no other.",
                "Give the executable bit to those files in {folder} whose first two characters are #!.",
                "A file in {folder} that begins with #! is a script and should be executable; others should not.",
                "Only what opens with a #! line in {folder} is a program. Mark just those files as executable.",
                folder=job.show(folder),
            )
        )
        job.solve(f'for f in {quote(folder)}*; do if [ "$(head -c 2 "$f")" = "#!" ]; then chmod +x "$f"; fi; done')
    for name in scripts:
        job.test(f"{name} is executable", f"assert os.access({name!r}, os.X_OK)")
    job.test(
        "others are not executable", f"assert not any(os.access(name, os.X_OK) for name in {others!r})", before=True
    )


def symlink(job: Job) -> None:
    """A symbolic link, new or pointed elsewhere."""
    job.bystander()
    target, link = job.name(), job.name()
    if job.level >= 1:
        target = f"{job.folder()}/{target}"
    job.put(target, job.sentences(1))
    if job.level == 2:
        link = f"{job.folder()}/{link}"
        job.bystander(folder=link.rpartition("/")[0] + "/")
    if job.level == 3:
        job.put_link(link, job.bystander())
        job.touch(link)
        job.ask(f"The symbolic link {job.show(link)} points to the wrong file. Make it point to {job.show(target)}.")
    else:
        job.ask(
            job.rng.choice(
                [
                    f"Create a symbolic link {job.show(link)} that points to {job.show(target)}.",
                    f"Make {job.show(link)} a symlink to {job.show(target)}.",
                    f"Add a soft link named {job.show(link)} for the file {job.show(target)}.",
                ]
            )
        )
    if job.level >= 1:
        job.ask("The link has to be relative, so that the whole folder can be moved.")
    up = "../" if "/" in link else ""
    job.solve(f"ln -sfn {paths(up + target, link)}")
    job.test(
        f"{link} points to the file",
        f"assert os.path.islink({link!r})",
        f"assert not os.path.isabs(os.readlink({link!r}))",
        f"assert os.path.realpath({link!r}) == os.path.realpath({target!r})",
    )


def lowercase(job: Job) -> None:
    """File names with capitals made small."""
    job.bystander()
    folder = "" if job.level == 0 else job.folder() + "/"
    stems = [job.name() for _ in range((1, 2, 3, 4)[job.level])]
    upper = [stem.title() if job.rng.random() < 0.5 else stem.upper() for stem in stems]
    deep = f"{job.folder()}/" if job.level == 3 else ""
    places = [folder + (deep if k % 2 else "") for k in range(len(stems))]
    if job.level == 0:
        job.ask(f"Rename the file {upper[0]} so that its name has only small letters: {stems[0]}")
        job.solve(f"mv {paths(upper[0], stems[0])}")
    else:
        below = " and its subfolders" if deep else ""
        job.ask(f"Rename the files in {job.show(folder)}{below} so that no file name contains a capital letter.")
        job.ask("Folders keep their names." if deep else "Contents stay the same.")
        job.solve(
            f'find {quote(folder)} -type f | while read -r f; do n="$(dirname "$f")/$(python3 -c '
            '\'import sys; print(sys.argv[1].lower())\' "$(basename "$f")")"; '
            'if [ "$f" != "$n" ]; then mv "$f" "$n"; fi; done'
        )
    for place, old, new in zip(places, upper, stems, strict=True):
        lines = job.sentences(1)
        job.put(place + old, lines)
        job.want_gone(place + old)
        job.want_text(place + new.lower(), lines, main=True)
