"""The console that a command prints to."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def plain_console(**options: Any) -> "Console":
    """A rich console that shows strings as they are: a path may hold what rich takes for markup, as "runs/[old]"."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, **options)
