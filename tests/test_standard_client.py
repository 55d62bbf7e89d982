"""The contract alone is enough: a client made from protos/ with plain grpc_tools, in a process of
its own that shares no code with the project."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import MakeCluster
from processes import ROOT, Processes

pytest.importorskip("grpc_tools", reason="grpcio-tools makes the stubs (the extra 'dev')")


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of stubs, made now."""
    out = tmp_path_factory.mktemp("stubs")
    protos = sorted((ROOT / "protos").glob("paramserver/v1/*.proto"))
    assert protos
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={ROOT / 'protos'}"]
    command += [f"--python_out={out}", f"--grpc_python_out={out}", *map(str, protos)]
    subprocess.run(command, check=True, timeout=60)
    for package in (out / "paramserver", out / "paramserver" / "v1"):
        # Packages like any other, so that they come before the project's own.
        (package / "__init__.py").touch()
    return out


@pytest.mark.parametrize("shards", [1, 2])
def test_a_standard_client(
    cluster: MakeCluster, processes: Processes, stubs: Path, shards: int
) -> None:
    """It initialises, joins, pulls, pushes in every way, cuts, and leaves; then ours goes on."""
    job = cluster(shards, lease=10.0)
    script = Path(__file__).with_name("standard_client.py")
    process = processes.python(str(script), *job.addresses, env={"PYTHONPATH": str(stubs)})
    assert process.wait() == 0, process.output
    assert process.stdout == ["done"] and not process.stderr
    client = job.client("worker:0")
    params = client.pull()
    assert sorted(params) == [f"layer{i}/w" for i in range(shards)]
    assert params.version == 4 and params.versions == (4,) * shards
    expected = np.arange(1000.0).reshape(20, 50) - 0.5 * 5
    for _ in range(2):
        for i, name in enumerate(params):
            assert params[name].dtype == (np.float32, np.float64)[i]
            np.testing.assert_array_equal(params[name], expected)
        params = client.push_pull({name: np.ones_like(params[name]) for name in params})
        expected = expected - 0.5
    assert params.complete and params.version == 6
    np.testing.assert_array_equal(params["layer0/w"], expected)
