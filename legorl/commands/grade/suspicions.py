"""What a patch adds that honest solutions seldom need: flags for people to look at, no part of the verdict.

suspicions(patch)      # {"inspects_frames"}: it reads its caller's variables
"""

import re

# Looked for in the lines that a patch adds to Python files.
_PATTERNS = {
    "always_equal": r"def __(?:eq|ne|lt|le|gt|ge|bool|contains)__\([^)]*\)[^:\n]*:\s*return (?:True|False|1|0)\s*$",
    "reads_test_state": r"PYTEST_|['\"]_?(?:pytest|unittest)['\"] in (?:sys\.)?modules",
    "inspects_frames": r"\b_getframe\b|inspect\.(?:stack|currentframe|getouterframes)|gc\.get_(?:objects|referrers)"
    r"|/proc/(?:self|\d+|%|\{)",
    "patches_builtins": r"\bbuiltins\.\w+ *=[^=]|setattr\( *(?:builtins|time)\b"
    r"|\btime\.(?:time|sleep|monotonic) *=[^=]",
}
_COMPILED = {flag: re.compile(pattern, re.M) for flag, pattern in _PATTERNS.items()}
_LIMIT = 4 << 20  # bytes of a patch that are looked at


def suspicions(patch: bytes) -> set[str]:
    """Return the flags of what `patch`, a git diff, adds to Python files."""
    text = added_python(patch[:_LIMIT].decode(errors="replace"))
    return {flag for flag, pattern in _COMPILED.items() if pattern.search(text)}


def added_python(patch: str) -> str:
    """Return the lines that `patch` adds to files called *.py."""
    lines, python, left = [], False, (0, 0)
    for line in patch.split("\n"):
        if left == (0, 0) and line.startswith("+++ "):
            python = line.rstrip('\t"\r').endswith(".py")
        elif match := re.match(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@", line) if left == (0, 0) else None:
            left = int(match[1] or 1), int(match[2] or 1)
        elif left != (0, 0):
            old, new = left
            left = max(0, old - (line[:1] not in "+\\")), max(0, new - (line[:1] not in "-\\"))
            if python and line.startswith("+"):
                lines.append(line[1:])
    return "\n".join(lines)
