"""Tables of several GPUs: what was measured, and the predicted cost of an exchange among many."""

from ostinato.bench.grid import Grid
from rendering import runs


def simulated(name: str) -> str:
    """Tabulate the predicted cost of the exchange between shards, and the fraction of linear scaling."""
    run, rows = runs.load(name), []
    for row in run["results"]:
        sizes = [f"{row[key]:,}" for key in ("processes", "channels", "steps")]
        times = [f"{1e6 * row[way]['seconds']:,.0f}" for way in ("ring", "doubling", "log-step")]
        rows.append([*sizes, f"{row['ring']['bytes'] / 1e6:,.2f}", *times, f"{row['share_of_linear']:.2f}"])
    head = ["GPUs", "channels", "steps a GPU", "MB received", "all-gather, ring, µs", "all-gather, doubling, µs"]
    inputs = run["inputs"]
    inside, between = inputs["inside"], inputs["between"]
    assumed = [
        f"{1e6 * inside['latency']:g} µs inside a machine",
        f"{1e6 * between['latency']:g} µs and {between['rate'] / 1e9:g} GB/s between two",
    ]
    return (
        f"{Grid([*head, 'log-step, µs', 'forward, of linear'], rows).markdown()}\n"
        f"Simulated. Measured: {1e6 * inputs['exchange_seconds']:g} µs for an exchange of a few bytes between two "
        f"H200, {inside['rate'] / 1e9:g} GB/s that each of four receives in a large one, "
        f"{1e3 * inputs['host_seconds']:g} ms a call on the host, and the memory's rate, "
        f"{inputs['memory_rate'] / 1e12:g} TB/s. Assumed: {', '.join(assumed)}. "
        f"`benchmarks/results/{name}.json`.\n"
    )


def measured(name: str) -> str:
    """Tabulate what one GPU and several do, in ms or tokens a second, and the fraction of linear scaling."""
    run, rows = runs.load(name), []
    gpus = run["gpus"]

    def row(what: str, of_one: str, of_all: str, share: float) -> None:
        rows.append([what, of_one, of_all, f"{share:.2f}"])

    for scan in run["weak_scaling"]:
        alone, together = scan["seconds"]["alone"], scan["seconds"]["all"]
        for way in alone:
            what = f"scan, {scan['steps']:,} steps a GPU of {scan['channels']} channels, {scan['gates']}: {way}"
            row(what, f"{1e3 * alone[way]:.2f} ms", f"{1e3 * together[way]:.2f} ms", alone[way] / together[way])
    layer = run["strong_scaling"]
    alone, together = layer["seconds"]["alone"], layer["seconds"]["all"]
    what = f"MinGRU of {layer['hidden_size']:,}, {layer['dtype']}, {layer['steps']:,} steps: forward and backward"
    row(what, f"{1e3 * alone:.2f} ms", f"{1e3 * together:.2f} ms", alone / together / gpus)
    models = run["language_model"]
    of_one = models["alone"]["tokens_per_second"]
    for way in ("DDP", "FSDP2"):
        model = models[way]
        held = f"{model['bytes_between_steps'] / 1e9:.2f} GB a GPU between steps"
        what = f"language model, {model['parameters'] / 1e6:.0f} million parameters, {way}, {held}"
        rate = model["tokens_per_second"]
        row(what, f"{of_one:,.0f} tokens/s", f"{rate:,.0f} tokens/s", rate / of_one / gpus)
    head = ["", "one GPU alone", f"{gpus} GPUs", f"share of {gpus} times one"]
    long, trained = run["long_sequence"], run["four_steps_of_adamw"]
    errors: dict[str, float] = {}
    for case, error in run["max_relative_errors"].items():
        what = case.partition(",")[0]
        errors[what] = max(error, errors.get(what, 0.0))
    as_one = max(found["max_relative_error"] for found in trained.values())
    layers = len({case.rpartition(", ")[0] for case in trained})
    return runs.table(
        name,
        head,
        rows,
        f"{long['steps']:,} steps of {long['channels']} channels, float32, forward and backward, once: "
        f"{1e3 * long['seconds']:.0f} ms, with relative errors up to {long['max_relative_error']:.0e} in samples, the "
        "boundaries between parts among them.",
        "Errors in parts, in float32 against one process in float64 and relative to the largest value: "
        f"{', '.join(f'{what} {error:.0e}' for what, error in errors.items())}.",
        f"After four steps of AdamW by DDP and FSDP2 the outputs of {layers} kinds of layers are within {as_one:.0e} "
        "of one process's.",
    )
