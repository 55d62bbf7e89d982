"""Makes the stubs in paramserver/v1 from protos/, or checks that the committed ones are up to date.

    python protos/generate.py            rewrites the stubs
    python protos/generate.py --check    changes nothing; exits 1 and names each stub that differs

Run it with the exact tools of requirements/proto.txt (`make proto` and `make proto-check` do).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PROTOS = Path(__file__).resolve().parent
ROOT = PROTOS.parent
STUBS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def main(argv: list[str] | None = None) -> int:
    """Runs one of the two commands above; returns the exit code."""
    parser = argparse.ArgumentParser(description="Make or check the generated stubs.")
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 on a difference")
    check = parser.parse_args(argv).check
    complaint = wrong_tools()
    if complaint:
        print(complaint, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        made = stubs(Path(folder))
    committed = stubs(ROOT)
    stale = sorted(name for name in made | committed if made.get(name) != committed.get(name))
    for name in stale:
        if check:
            print(f"{name}: {state(name, made, committed)}; run `make proto`", file=sys.stderr)
        elif name in made:
            (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / name).write_bytes(made[name])
        else:
            (ROOT / name).unlink()
    print(f"{len(made)} stubs, {len(stale)} {'out of date' if check else 'rewritten'}")
    return 1 if check and stale else 0


def wrong_tools() -> str:
    """One line that says which tool is not the pinned one, or nothing."""
    for line in (ROOT / "requirements" / "proto.txt").read_text().splitlines():
        name, pinned, wanted = line.partition("==")
        if not pinned:
            continue
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "missing"
        if found != wanted:
            return f"{name} is {found}, not {wanted}: run this through `make proto`"
    return ""


def generate(out: Path) -> None:
    """Makes the stubs of every .proto file below `out`. Raises: CalledProcessError."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    kinds = [f"--python_out={out}", f"--grpc_python_out={out}"]
    kinds += [f"--mypy_out=quiet:{out}", f"--mypy_grpc_out=quiet:{out}"]
    # protoc finds the two mypy plugins beside the interpreter.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", *kinds, *sources],
        env={**os.environ, "PATH": path},
        cwd=PROTOS,
        check=True,
    )


def stubs(root: Path) -> dict[str, bytes]:
    """The stubs of each package below `root`, by their path from it."""
    folders = {path.relative_to(PROTOS).parent for path in PROTOS.rglob("*.proto")}
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for folder in folders
        for pattern in STUBS
        for path in (root / folder).glob(pattern)
    }


def state(name: str, made: dict[str, bytes], committed: dict[str, bytes]) -> str:
    """How a stub differs, in a word."""
    if name not in committed:
        return "missing"
    return "changed" if name in made else "has no .proto any more"


if __name__ == "__main__":
    sys.exit(main())
