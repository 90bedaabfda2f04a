"""A hook of mkdocs: the files beside `docs/` become pages of the site, with their links changed to fit.

README.md is the first page; SECURITY.md, CHANGELOG.md and CONTRIBUTING.md are pages, too. Links to files that are no
pages, such as examples, become their text.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

HOME = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are not in docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(HOME / source).read_text("utf8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Changes links to other files of the repository; they are relative to the root or to docs/."""
    return LINK.sub(lambda match: _link(match, page.file.src_uri in PAGES.values()), markdown)


def _link(match: re.Match[str], at_root: bool) -> str:
    picture, text, target = match.groups()
    if target.startswith(("https://", "#")):
        return match[0]
    path, hash_, anchor = target.partition("#")
    place = ((HOME if at_root else HOME / "docs") / path).resolve()
    name = place.relative_to(HOME).as_posix()
    if name in PAGES:
        return f"[{text}]({PAGES[name]}{hash_}{anchor})"
    if name.startswith("docs/"):
        return f"{picture}[{text}]({name.removeprefix('docs/')}{hash_}{anchor})"
    return f"`{name}`" if text == name else f"{text} (`{name}`)"
