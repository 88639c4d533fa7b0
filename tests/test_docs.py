"""The documentation is true: its code runs, and its figures are those of the committed runs."""

import ast
import inspect
import pkgutil
import re
import shlex
from pathlib import Path

import pytest
import torch
import typer

import ostinato.distributed
import ostinato.numpy
import tables
from ostinato.bench.grid import Grid
from ostinato.bench.measure import measure
from ostinato.bench.report import dashes, figures
from ostinato.bench.runs import environment, write_json
from ostinato.bench.workloads import Training
from ostinato.cli import app
from rendering import papers, runs

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MEASURED = re.compile(
    r"\d\s?(ms|µs|us|ns|seconds?|minutes?|[KMGT]B/s|[GT]FLOP|nats|bits per)\b|\d\s?×(?!\s?\d)|\btimes (as fast|faster)"
)


def name_of(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_tables_are_those_of_the_runs(path):
    text = path.read_text()
    assert tables.with_tables(text) == text, "run: python benchmarks/tables.py"


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_no_measured_figure_stands_outside_the_tables(path):
    prose = tables.BLOCK.sub("", path.read_text())
    assert not [line for line in prose.splitlines() if MEASURED.search(line)]


def test_every_table_and_plot_is_shown():
    text = "".join(path.read_text() for path in PAGES)
    assert set(tables.TABLES) == {match[2] for match in tables.BLOCK.finditer(text)}
    assert {name for name in tables.PLOTS if runs.measured(name)} == set(re.findall(r"plots/([a-z0-9-]+)\.svg", text))


def test_every_published_figure_appears():
    pages = {name: tables.table_of(f"papers-{name}") for name in papers.SWEEPS}
    published = [
        (name, label, value)
        for name, sweep in papers.SWEEPS.items()
        for label, values in [*sweep.published.items(), *((r.name, r.published) for r in sweep.ratios if r.published)]
        for value in values.values()
    ]
    assert len(published) > 26 + 2 * 24
    for name, label, value in published:
        rows = [row for row in pages[name].splitlines() if row.startswith((f"| {label} |", "| published |"))]
        assert any(f"| {figures(value)}" in row for row in rows), (name, label, value)


def test_every_run_is_shown(monkeypatch):
    shown = set()
    load_run = runs.load
    monkeypatch.setattr(runs, "load", lambda name: shown.add(name) or load_run(name))
    for name in tables.TABLES:
        tables.table_of(name)
    assert {path.stem for path in runs.RESULTS.glob("*.json")} - {"training-sweep-gpu"} <= shown


def test_what_is_not_measured_is_explained_and_empty_columns_are_dropped():
    rows = {"a": {"seconds": 1.0}, "b": {"unavailable": "not here"}, "c": {"unavailable": "never"}}
    records = [{"contestants": rows}, {"contestants": {"a": {"seconds": 1.0}, "b": {"seconds": 1.0}}}]
    assert dashes(records, {"a": "A", "b": "B", "c": "C"}) == ["–: B: not here."]
    rows["c"]["unavailable"] = "peers is not installed (No module named 'peer')"
    missing = "Not installed for this run: peers."
    assert dashes(records, {"a": "A", "b": "B", "c": "C"}) == ["–: B: not here.", missing]
    assert Grid(["x", "y"], [["1", "–"], ["2", "–"]]).markdown() == "| x |\n| --- |\n| 1 |\n| 2 |\n"


def test_a_changed_figure_is_noticed():
    text = (ROOT / "README.md").read_text()
    changed = re.sub(r"\*\*\d+\.\d+ ms\*\*", "**0.001 ms**", text, count=1)
    assert changed != text
    assert tables.with_tables(changed) == text


@pytest.mark.parametrize("name", sorted(tables.TABLES))
def test_a_table_is_of_one_device(name, monkeypatch):
    devices = set()

    def load(run):
        content = load_run(run)
        devices.add(content.get("environment", content)["device"])
        return content

    load_run = runs.load
    monkeypatch.setattr(runs, "load", load)
    tables.table_of(name)
    assert len(devices) <= 1  # none of a run that is still to be made


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder of results, empty at first."""
    monkeypatch.setattr(runs, "RESULTS", tmp_path)
    runs.load.cache_clear()
    yield tmp_path
    runs.load.cache_clear()


def test_training_is_shown_once_it_is_measured(results):
    work = Training("LSTM", 16, 2, 10, dtype=torch.float32, who=("Ostinato", "torch.nn"))
    (record,) = measure(work, torch.device("cpu"), 0.01)
    names = ["training", "training-errors", "training-sweep", "training-random", "training-cpu", "inference-cpu"]
    assert [tables.table_of(name) for name in names] == [runs.UNMEASURED] * 6

    ours, theirs = (record["contestants"][name] for name in ("Ostinato", "torch.nn"))
    ours |= {"microseconds_a_step": 2.0, "seconds": 2.0, "extra_memory_bytes": 3e6}
    theirs |= {"microseconds_a_step": 9.0, "seconds": 9.0, "times_ostinato": 4.5, "extra_memory_bytes": 7e6}
    record["contestants"]["torch.nn in a CUDA graph"] = theirs | {"microseconds_a_step": 6.0, "seconds": 6.0}
    record["contestants"]["torchrl"] = {"unavailable": "torchrl is not installed"}
    record["contestants"]["Ostinato in a CUDA graph"] = theirs | {"microseconds_a_step": 8.0, "max_error": 0.2}
    ours["errors"] |= {"h0": 1e-7, "c0": 3e-7}
    theirs["errors"] |= {"h0": 5e-7, "c0": 4e-7}
    content = {**environment(torch.device("cpu")), "commit": "0" * 40, "results": [record]}
    for name in ("training-gpu", "training-sweep-gpu"):
        write_json(results / f"{name}.json", content)
    head, _, row, *rest = tables.TABLES["training"]().splitlines()
    assert "torchrl" not in head
    assert row.startswith("| LSTM 16 B2 T10 dense fp32 |")
    for cell in ("**2.00**", "9.00 (4.5×) |", "6.00 (4.5×) |", "8.00 (4.5×) † |", "**3.0×**"):
        assert cell in row
    assert rest[1].startswith("† its error")
    row = tables.TABLES["training-errors"]().splitlines()[2]
    assert "**3e-07** / 5e-07" in row
    assert "**3** / 7" in row
    assert "plots/training-sweep-gpu.svg" in tables.table_of("training-sweep")
    assert tables.table_of("training-cpu") == runs.UNMEASURED


@pytest.mark.parametrize("name", [name for name in tables.PLOTS if runs.measured(name)])
def test_plots_are_those_of_the_runs(name):
    matplotlib = pytest.importorskip("matplotlib")
    committed = (ROOT / "docs" / "plots" / f"{name}.svg").read_text()
    if f"Matplotlib v{matplotlib.__version__}" not in committed:
        pytest.skip("another Matplotlib draws the same figures by other strokes")
    assert tables.svg(name) == committed, "run: python benchmarks/tables.py"


def python_of(path):
    """Return the Python blocks of a page as one program, with the page's line numbers."""
    lines, keep = [], False
    for line in path.read_text().splitlines():
        fence = line.startswith("```")
        keep = line == "```python" if fence else keep
        lines.append("" if fence or not keep else line)
    return "\n".join(lines)


def commands(path):
    """Return the calls of the command line in a page's shell blocks, including those under torchrun."""
    blocks = re.findall(r"```sh\n(.*?)```", path.read_text().replace("\\\n", ""), re.DOTALL)
    lines = [re.sub("^torchrun .*? -m ", "", line) for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("ostinato ")]


@pytest.mark.parametrize("line", [line for path in PAGES for line in commands(path)])
def test_commands_are_understood(line):
    """Their arguments are parsed, and nothing is run."""
    command, (name, *arguments) = typer.main.get_command(app), shlex.split(line, comments=True)
    while hasattr(command, "commands"):
        name, *arguments = arguments
        command = command.commands[name]
    command.make_context(name, arguments)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_outside_of_the_site_lead_somewhere(name):
    """Links of the site are checked by MkDocs."""
    links = re.findall(r"\]\((?!http)([^)#]+)#?([^)]*)\)", (ROOT / name).read_text())
    assert links
    for path, anchor in links:
        assert (ROOT / path).exists(), path
        if anchor:
            headings = re.findall("^#+ (.*)", (ROOT / path).read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, anchor


def listed(path):
    """Return the names in the table of a package's docstring, without the suffixes of modules and folders."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return [name.rstrip("/").removesuffix(".py") for name in re.findall(r"^``([\w./]+)``  ", docstring, re.MULTILINE)]


SOURCE = ROOT / "src" / "ostinato"
PACKAGES = [path for folder in (SOURCE, ROOT / "benchmarks") for path in sorted(folder.rglob("__init__.py"))]
BACKENDS = SOURCE / "kernels" / "scan" / "__init__.py"  # which is what its table lists, not files


@pytest.mark.parametrize("path", [path for path in PACKAGES if listed(path) and path != BACKENDS], ids=name_of)
def test_a_package_lists_the_files_that_it_has(path):
    files = [file for file in path.parent.iterdir() if file.suffix == ".py" or (file / "__init__.py").exists()]
    modules, names = {file.stem for file in files} - {"__init__"}, {*listed(path)}
    assert modules <= names
    assert not [name for name in names - modules if not (path.parent / name).exists()]


def imported(path):
    """Yield the modules of this library that a module imports anywhere, each as its parts: ("scan", "cpu")."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "ostinato":
            for name in node.names:
                yield (*node.module.split("."), name.name)[1:]


@pytest.mark.parametrize("package", [("kernels",), ("kernels", "persistent")], ids="/".join)
def test_modules_import_from_those_listed_above_them_alone(package):
    folder, above = SOURCE.joinpath(*package), []
    for name in listed(folder / "__init__.py"):
        above.append(name)
        for file in [*(folder / name).rglob("*.py"), *folder.glob(f"{name}.py")]:
            own = [parts for parts in imported(file) if parts[0] != "files"]
            assert {parts[0] for parts in own} <= {"kernels"}, file
            depth = len(package)
            assert {parts[depth] for parts in own if parts[:depth] == package} <= {*above}, file


def test_imports_point_from_the_command_line_down():
    order = ["training", "bench", "cli"]  # all else is below
    for file in SOURCE.rglob("*.py"):
        place = file.relative_to(SOURCE).parts[0]
        above = {"__main__.py": [], **{name: order[i + 1 :] for i, name in enumerate(order)}}.get(place, order)
        assert not [parts for parts in imported(file) if parts[0] in above], file


WITH_CODE = [path for path in PAGES if python_of(path).strip()]


def reference():
    """Return the names that the reference lists."""
    pages = (ROOT / "docs" / "reference").glob("*.md")
    return re.findall(r"^::: ([\w.]+)", "".join(page.read_text() for page in sorted(pages)), re.MULTILINE)


def test_all_that_is_exported_is_in_the_reference():
    modules = ostinato, ostinato.distributed, ostinato.numpy
    exported = {f"{module.__name__}.{name}" for module in modules for name in module.__all__}
    assert exported - set(reference()) == {"ostinato.numpy.CUDA_AVAILABLE"}  # a constant


@pytest.mark.parametrize("path", reference())
def test_a_name_of_the_reference_has_an_example_and_a_signature(path):
    thing = pkgutil.resolve_name(":".join(path.rsplit(".", 1)))
    assert ">>> " in thing.__doc__
    first, *_ = [*inspect.signature(thing).parameters.values(), None]
    assert first is None or first.kind is not first.VAR_POSITIONAL


@pytest.mark.parametrize("path", reference())
def test_arguments_that_a_name_of_the_reference_lists_are_those_that_it_takes(path):
    thing = pkgutil.resolve_name(":".join(path.rsplit(".", 1)))
    docstring = inspect.getdoc(thing)
    assert not re.search("^Args(,.*)?: as", docstring, re.MULTILINE)  # another may take more
    section = re.search(r"^Args:\n((?: +.*\n|\n)+)", docstring, re.MULTILINE)
    if section is not None:
        named = ", ".join(re.findall(r"^    (\w[\w, ]*):", section[1], re.MULTILINE)).split(", ")
        assert sorted(named) == sorted(inspect.signature(thing).parameters)


OPTIONAL = {"deployment.md": ("huggingface_hub", "onnxruntime", "onnxscript")}


@pytest.mark.filterwarnings(
    "error",
    "ignore:.*torch.jit:DeprecationWarning",  # PyTorch's own exports and forward mode call what it warns of
    "ignore:.*torch.jit:FutureWarning",
    "ignore:.*LeafSpec:FutureWarning",
    r"ignore:\s*torch.ao.quantization is deprecated:DeprecationWarning",
    "ignore:torch.quantize_per_tensor:UserWarning",
    "ignore:The given buffer is not writable:UserWarning",  # PyTorch 2.11 of the packages that it loads
)
@pytest.mark.parametrize("path", WITH_CODE, ids=name_of)
def test_code_of_a_page_runs(path, tmp_path, monkeypatch):
    for package in OPTIONAL.get(path.name, ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(), torch._dynamo.config.patch(allow_rnn=False):
        exec(compile(python_of(path), str(path), "exec"), {"__name__": "__main__"})
