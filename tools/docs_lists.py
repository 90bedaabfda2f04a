"""An extension of griffe: lines `name: what it is` of a docstring become a list on the site.

The docstrings of this project describe arguments so, in plain lines that read well in an editor.
"""

import re
from typing import Any

import griffe

LINE = re.compile(r"^([a-z_][a-z_, ]{0,60}): (?=\S)")


def as_list(text: str) -> str:
    """Returns a docstring with such lines, and what follows on from them, as items of a list."""
    lines: list[str] = []
    inside = code = False
    for line in text.splitlines():
        code ^= line.startswith("```")
        match = None if code else LINE.match(line)
        if match and all(re.fullmatch(r"[a-z_]+", word) for word in match[1].split(", ")):
            lines += ([] if inside else [""]) + [f"- `{match[1]}`: {line[match.end() :]}"]
            inside = True
        elif inside and line.strip() and not line.startswith(" "):
            lines.append(f"  {line}")
        else:
            inside = inside and bool(line.strip())
            lines.append(line)
    return "\n".join(lines)


class Lists(griffe.Extension):
    """Changes every docstring with `as_list`."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_list(obj.docstring.value)
