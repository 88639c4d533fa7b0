"""What MkDocs runs while it builds: the command line describes itself."""

import subprocess
import sys
from typing import Any

COMMAND_LINE = "reference/command-line.md"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    if page.file.src_uri != COMMAND_LINE:
        return markdown
    command = [sys.executable, "-m", "typer", "ostinato.cli", "utils", "docs", "--name", "ostinato"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return markdown + text.partition("\n")[2]  # the page has a title of its own
