"""Looks up the packages of sbom.cdx.json in PyPI's database of vulnerabilities, by pip-audit.

    python tools/audit.py           # `make audit`, which installs pip-audit first

Exits with 1 if a package has a known vulnerability or pip-audit fails. Where the database cannot be reached, it says so
in one line and exits with 0. A mirror of PyPI without the database answers as if it knew no package at all; pip-audit
calls that "no known vulnerabilities".
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

SBOM = Path(__file__).parents[1] / "sbom.cdx.json"
UNREACHABLE = ("connection", "resolve", "timed out", "unreachable")


def verdict(output: str, errors: str) -> tuple[int, str]:
    """Returns the exit code for what pip-audit printed, and what to tell the user."""
    try:
        packages = json.loads(output)["dependencies"]
    except (ValueError, KeyError, TypeError):
        last = (errors.strip().splitlines() or ["it printed nothing"])[-1]
        if any(word in errors.lower() for word in UNREACHABLE):
            return 0, "not audited: the vulnerability database cannot be reached from here"
        return 1, f"error: pip-audit failed: {last}"
    skipped = [p["name"] for p in packages if "skip_reason" in p]
    if len(skipped) == len(packages):
        return 0, "not audited: the registry here has no vulnerability database"
    lines = [f"{p['name']} {p['version']}: {v['id']}" for p in packages for v in p.get("vulns", [])]
    unknown = f", not found: {', '.join(skipped)}" if skipped else ""
    summary = f"audited {len(packages) - len(skipped)} of {len(packages)} packages{unknown}"
    return bool(lines), "\n".join([*lines, f"{summary}; known vulnerabilities: {len(lines)}"])


def main() -> int:
    listed = json.loads(SBOM.read_text("utf8"))["components"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("".join(f"{c['name']}=={c['version']}\n" for c in listed))
        file.flush()
        words = ["--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off", "-r", file.name]
        done = subprocess.run([sys.executable, "-m", "pip_audit", *words], capture_output=True, text=True)
    code, text = verdict(done.stdout, done.stderr)
    print(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
