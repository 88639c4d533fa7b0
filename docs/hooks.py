"""What MkDocs runs while it builds: the command line describes itself."""

import re
import subprocess
import sys
from typing import Any

COMMAND_LINE = "reference/command-line.md"
SECTION = re.compile(r"^#+ `[\w ]+ (\w+)`\n\n(.+?)\n\n", re.MULTILINE | re.DOTALL)
SHORTENED = re.compile(r"^\* `(\w+)`: .*\.\.\.$", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    if page.file.src_uri != COMMAND_LINE:
        return markdown
    command = [sys.executable, "-m", "typer", "ostinato.cli", "utils", "docs", "--name", "ostinato"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # Lists of commands shorten what each one's section says in full.
    summaries = {name: " ".join(summary.split()) for name, summary in SECTION.findall(text)}
    text = SHORTENED.sub(lambda match: f"* `{match[1]}`: {summaries[match[1]]}", text)
    return markdown + text.partition("\n")[2]  # the page has a title of its own
