"""Rules about the sources as a whole: who may import whom, and what may appear nowhere.

Reads the sources with `ast`. Each rule is a function from a source to complaints, so that each is
also shown a source that breaks it.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("paramserver", "worker", "chief")


@dataclass(frozen=True)
class Layer:
    """Modules (patterns), the layers they may import beside their own, and packages of others."""

    name: str
    modules: str
    below: str = ""
    outside: str = ""


#: From the bottom up. The client side never imports the server side, nor the other way round.
#: Layers that decide and do no I/O.
PURE = {"core", "shard"}

LAYERS = (
    Layer(
        "core",
        "paramserver.errors paramserver.cluster paramserver.placement paramserver.optimizers "
        "paramserver.ranges paramserver.schedules paramserver.rule paramserver.rules "
        "paramserver.squares paramserver.moments paramserver.blocks "
        "paramserver.consistency paramserver.membership paramserver.layout paramserver.buffers "
        "paramserver.grants paramserver.cut paramserver.cut_off "
        "paramserver.job paramserver.parameters paramserver.push paramserver.state "
        "paramserver.update",
        outside="numpy",
    ),
    Layer("shard", "paramserver.shard", below="core", outside="numpy"),
    Layer("contract", "paramserver.v1*", outside="grpc google"),
    Layer(
        "wire",
        "paramserver.allocation paramserver.framing paramserver.codec paramserver.convert "
        "paramserver.gradients "
        "paramserver.params "
        "paramserver.transfer paramserver.transport paramserver.status paramserver.retry "
        "paramserver.read_ahead",
        below="core contract",
        outside="numpy grpc google",
    ),
    Layer(
        "client",
        "paramserver.link paramserver.connection paramserver.exchange paramserver.client "
        "paramserver.survey paramserver.control_client",
        below="core contract wire",
        outside="numpy grpc google",
    ),
    Layer(
        "server",
        "paramserver.streams paramserver.host paramserver.push_pull paramserver.stewardship "
        "paramserver.service "
        "paramserver.control_service paramserver.server",
        below="core shard contract wire",
        outside="numpy grpc google",
    ),
    Layer("face", "paramserver", below="core wire client server"),
    Layer(
        "ps command",
        "paramserver.__main__ paramserver.bench",
        below="core wire client server face",
        outside="numpy",
    ),
    Layer("models", "worker worker.models* worker.data", below="core", outside="numpy"),
    Layer(
        "chief",
        "chief chief.[!_]*",
        below="core wire client face models",
        outside="numpy safetensors",
    ),
    Layer(
        "session",
        "worker.hooks worker.session",
        below="core wire client face models chief",
        outside="numpy",
    ),
    Layer(
        "commands",
        "worker.__main__ chief.__main__",
        below="core wire client face models chief session",
        outside="numpy",
    ),
)

#: What the core may not use: it decides, others act.
IMPURE = {
    "threads": "threading _thread queue concurrent multiprocessing asyncio sched signal",
    "the clock": "time datetime",
    "files": "os io pathlib shutil tempfile glob fileinput mmap logging sqlite3 tomllib",
    "sockets and processes": "socket socketserver ssl select selectors http urllib subprocess",
    "imports by name": "importlib pkgutil runpy",
}
#: The one door: TF_CONFIG is read from os.environ if the caller hands in no environment.
IMPURE_ALLOWED = {("paramserver.cluster", "os")}
IMPURE_CALLS = {"open", "input", "print", "load", "save", "savez", "fromfile", "tofile", "memmap"}

#: Extras: imported inside the function that needs one, outside the core, and nowhere else.
EXTRAS = {"sklearn"}

#: What `import paramserver as ps` promises.
FACE = {
    "Async",
    "Client",
    "ClusterSpec",
    "ParamServerError",
    "Server",
    "Ssp",
    "Sync",
    "optimizers",
}

#: Whoever feeds these received or stored bytes runs the sender's code.
RUNS_CODE = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}
RUNS_CODE_CALLS = {"eval", "exec", "compile", "__import__"}


@dataclass(frozen=True)
class Import:
    """One imported module; `deferred` inside a function, `typing` under TYPE_CHECKING."""

    target: str
    line: int
    deferred: bool
    typing: bool


def sources() -> dict[str, str]:
    """Every module of ours by its dotted name (a package has the name of its folder)."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path.read_text(encoding="utf-8")
    return found


SOURCES = sources()
OURS = {name: text for name, text in SOURCES.items() if not name.startswith("paramserver.v1")}
INITS = {".".join(p.parent.relative_to(ROOT).parts) for p in ROOT.glob("*/**/__init__.py")}


def layer_of(module: str) -> Layer | None:
    """The layer that lists `module`."""
    for layer in LAYERS:
        if any(fnmatchcase(module, pattern) for pattern in layer.modules.split()):
            return layer
    return None


def imports(module: str, source: str) -> Iterator[Import]:
    """What `source` imports, as absolute names; `from a import b` is a.b where that is a module."""

    def visit(node: ast.AST, deferred: bool, typing: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, deferred, typing)
        elif isinstance(node, ast.ImportFrom):
            package = module if module in INITS else module.rpartition(".")[0]
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            inner = (f"{base}.{alias.name}" for alias in node.names)
            for target in sorted({name if name in SOURCES else base for name in inner}):
                yield Import(target, node.lineno, deferred, typing)
        deferred |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing |= isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for child in ast.iter_child_nodes(node):
            yield from visit(child, deferred, typing)

    yield from visit(ast.parse(source), False, False)


def calls(source: str) -> Iterator[tuple[str, ast.Call]]:
    """Every call by the last part of its name: `np.load(...)` is "load"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func).rpartition(".")[2], node


def layering(module: str, source: str) -> list[str]:
    """Imports that point up or sideways, and impurities of the core."""
    layer = layer_of(module)
    if layer is None:
        return [f"{module} is in no layer: add it to LAYERS in {Path(__file__).name}"]
    extras = EXTRAS if layer.name not in PURE else set()
    found = []
    for each in imports(module, source):
        root = each.target.partition(".")[0]
        at = f"{module}:{each.line} imports {each.target}"
        if root in PACKAGES:
            target = layer_of(each.target)
            if target is None or target.name not in {layer.name, *layer.below.split()}:
                place = target.name if target else "no"
                found.append(f"{at} ({place} layer); {layer.name} may import: {layer.below}")
        elif root in sys.stdlib_module_names:
            if layer.name in PURE and (module, each.target) not in IMPURE_ALLOWED:
                found += [
                    f"{at}: no {what} in the core"
                    for what, names in IMPURE.items()
                    if root in names.split()
                ]
        elif root not in layer.outside.split() and not (each.deferred and root in extras):
            found.append(f"{at}; {layer.name} may import: {layer.outside}")
    if layer.name in PURE:
        found += [
            f"{module}:{call.lineno} calls {name}: no input or output in the core"
            for name, call in calls(source)
            if name in IMPURE_CALLS
        ]
    return found


def cycle(modules: Mapping[str, str]) -> list[str]:
    """Modules that import each other in a circle, or nothing."""
    graph = {
        name: {i.target for i in imports(name, text) if not (i.deferred or i.typing)} - {name}
        for name, text in modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def running_data(module: str, source: str) -> list[str]:
    """Uses that would turn data into code."""
    found = [
        f"{module}:{each.line} imports {each.target}"
        for each in imports(module, source)
        if each.target.partition(".")[0] in RUNS_CODE
    ]
    for name, call in calls(source):
        if ast.unparse(call.func) in RUNS_CODE_CALLS:
            found.append(f"{module}:{call.lineno} calls {name}")
        for keyword in call.keywords:
            if keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False":
                found.append(f"{module}:{call.lineno} allows pickles")
    return found


def undocumented(module: str, source: str) -> list[str]:
    """The module, its public classes and functions, and their public methods, without a docstring.

    A method of a class with bases may inherit its contract."""

    def visit(node: ast.Module | ast.ClassDef, path: str) -> Iterator[str]:
        if not ast.get_docstring(node):
            yield path
        for child in node.body:
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if child.name.startswith("_"):
                continue
            if isinstance(child, ast.ClassDef):
                yield from visit(child, f"{path}.{child.name}")
            elif not (ast.get_docstring(child) or exempt(node, child)):
                yield f"{path}.{child.name}"

    def exempt(owner: ast.AST, child: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
        marks = {ast.unparse(mark).rpartition(".")[2] for mark in child.decorator_list}
        inherits = isinstance(owner, ast.ClassDef) and bool(owner.bases)
        return inherits or bool(marks & {"overload", "setter", "deleter"})

    return list(visit(ast.parse(source), module))


def repeated_floats(proto: str) -> list[str]:
    """Declarations that send numbers one by one; tensors travel as bytes."""
    return re.findall(r"\brepeated\s+(?:float|double)\b.*", re.sub(r"//.*", "", proto))


def pins(file: str) -> dict[str, str]:
    """The `name==version` lines of a file in requirements/."""
    lines = (ROOT / "requirements" / file).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def none(complaints: list[str]) -> None:
    """Fails with the complaints, one a line."""
    assert not complaints, "\n" + "\n".join(complaints)


def test_there_are_sources() -> None:
    assert {"paramserver", "paramserver.errors", "paramserver.v1.tensor_pb2"} <= SOURCES.keys()


def test_imports_point_down() -> None:
    none([bad for name, text in OURS.items() for bad in layering(name, text)])


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("paramserver.surprise", ""),
        ("paramserver.shard", "import threading"),
        ("paramserver.shard", "from time import monotonic"),
        ("paramserver.shard", "def f():\n    import os.path"),
        ("paramserver.shard", "import grpc"),
        ("paramserver.shard", "def f():\n    import sklearn"),
        ("paramserver.shard", "open('x')"),
        ("paramserver.shard", "np.load('x')"),
        ("paramserver.shard", "from paramserver.v1 import tensor_pb2"),
        ("paramserver.shard", "import paramserver as ps"),
        ("paramserver.codec", "from paramserver.client import Client"),
        ("paramserver.client", "from paramserver.service import ParameterService"),
        ("paramserver.client", "from .host import Host"),
        ("paramserver.client", "def f():\n    from paramserver.server import Server"),
        ("paramserver.service", "from paramserver.client import Client"),
        ("paramserver.host", "import worker.data"),
        ("worker.models.linear", "from chief.checkpoint import Checkpoint"),
        ("worker.data", "import sklearn.datasets"),
        ("chief.checkpoint", "from worker.session import Session"),
        ("chief.supervisor", "from paramserver.server import Server"),
        ("worker.session", "import grpc"),
    ],
)
def test_an_import_that_points_up_is_noticed(module: str, source: str) -> None:
    assert len(layering(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("paramserver.shard", "import math\nimport numpy as np\nfrom paramserver import errors"),
        ("paramserver.server", "import threading\nimport grpc\nfrom .service import f"),
        ("worker.data", "def load():\n    from sklearn.datasets import load_diabetes"),
        ("worker.session", "from chief import checkpoint\nimport paramserver as ps"),
    ],
)
def test_an_import_that_points_down_is_fine(module: str, source: str) -> None:
    assert layering(module, source) == []


def test_no_circles() -> None:
    assert cycle(OURS) == []


def test_a_circle_is_noticed() -> None:
    there = {"worker.a": "import worker.b", "worker.b": "import worker.a"}
    assert set(cycle(there)) == {"worker.a", "worker.b"}
    assert cycle({**there, "worker.b": "def f():\n    import worker.a"}) == []


def test_nothing_runs_what_it_receives() -> None:
    none([bad for name, text in OURS.items() for bad in running_data(name, text)])


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from marshal import loads",
        "import yaml",
        "eval(text)",
        "exec(text)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_running_received_data_is_noticed(source: str) -> None:
    assert len(running_data("worker.data", source)) == 1


def test_what_is_public_says_what_it_is() -> None:
    none([bad for name, text in OURS.items() for bad in undocumented(name, text)])


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("x = 1", ["m"]),
        ('"""M."""\ndef f(): ...\ndef _g(): ...', ["m.f"]),
        ('"""M."""\nclass C:\n    def f(self): ...', ["m.C", "m.C.f"]),
        ('"""M."""\nclass C(Base):\n    """C."""\n    def f(self): ...', []),
    ],
)
def test_a_missing_docstring_is_noticed(source: str, names: list[str]) -> None:
    assert undocumented("m", source) == names


def test_every_exported_name_is_there() -> None:
    for name in OURS:
        if not name.endswith("__main__"):
            module = importlib.import_module(name)
            exported = getattr(module, "__all__", [])
            assert [each for each in exported if not hasattr(module, each)] == [], name
            assert len(set(exported)) == len(exported), name


def test_the_face_is_whole() -> None:
    assert set(importlib.import_module("paramserver").__all__) >= FACE


def test_arrays_travel_as_bytes() -> None:
    protos = sorted((ROOT / "protos").rglob("*.proto"))
    assert protos
    none([bad for path in protos for bad in repeated_floats(path.read_text("utf-8"))])


def test_repeated_floats_are_noticed() -> None:
    assert repeated_floats("repeated float x = 1;  // why not") == ["repeated float x = 1;  "]
    assert repeated_floats("// never repeated double\nrepeated int64 shape = 1;") == []


def test_the_floors_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    declared = dict(re.findall(r"([\w-]+)>=([\d.]+)", " ".join(project["dependencies"])))
    floors = pins("floor.txt")
    assert declared.keys() == floors.keys()
    for name, floor in declared.items():
        assert f"{floors[name]}.".startswith(f"{floor}."), name
    assert pins("proto.txt")["grpcio-tools"] == declared["grpcio"]
    generated = SOURCES["paramserver.v1.tensor_pb2"]
    assert f"# Protobuf Python Version: {declared['protobuf']}\n" in generated
