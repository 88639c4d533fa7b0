"""Tables of what the programs of ``examples/`` return."""

from ostinato.bench.report import figures
from rendering import runs


def reinforcement(name: str) -> str:
    """Tabulate what the policies of the example reach, after how many rollouts, and how fast."""
    rows = []
    for row in runs.load(name)["results"]:
        curve = row["curve"]
        first = next((str(i) for i, share in enumerate(curve, 1) if share >= 0.95), "–")
        rows.append([row["policy"], f"{sum(curve[-5:]) / 5:.0%}", first, f"{row['steps_per_second']:,.0f}"])
    rollouts = len(runs.load(name)["results"][0]["curve"])
    head = ["policy", f"right in the last 5 of {rollouts} rollouts", "first 95 % right", "steps a second"]
    return runs.table(name, head, rows)


def audio(name: str) -> str:
    """Tabulate the time of a frame in the example on audio, and the speed relative to the first network."""
    results = runs.load(name)["results"]
    rows = []
    for row in results:
        microseconds = [f"{1e6 * row[key]:.0f}" for key in ("median", "slow")]
        rows.append([row["network"], *microseconds, f"{results[0]['median'] / row['median']:.1f}×"])
    return runs.table(name, ["network", "µs a frame", "99 % below", "speed"], rows)


def recurrent_gemma(name: str) -> str:
    """Tabulate the milliseconds of RecurrentGemma with its own loop, and with a recurrence instead."""
    rows = []
    for row in runs.load(name)["results"]:
        loop, recurrence = row["loop"], row["recurrence"]
        rows.append([row["work"], figures(1e3 * loop), figures(1e3 * recurrence), f"{loop / recurrence:.1f}×"])
    return runs.table(name, ["ms, forward and backward", "with its loop", "with a recurrence", "speed"], rows)
