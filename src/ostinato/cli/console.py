"""The console that a command prints to."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def plain_console(**options: Any) -> "Console":
    """Return a rich console that prints strings as they are: in a path, rich would take "runs/[old]" for markup."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, **options)
