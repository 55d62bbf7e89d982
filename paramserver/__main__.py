"""`python -m paramserver`: one parameter server process.

Prints `ps serving on HOST:PORT` when it is ready. Exit codes: 0 stopped by a signal, by Shutdown,
or (--exit-when-done) because the job is done; 2 a wrong setting; 70 a defect of ours; 130 a second
signal.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence

from paramserver import cluster
from paramserver.allocation import keep_large_blocks
from paramserver.errors import ConfigError
from paramserver.host import HostSettings
from paramserver.layout import Limits
from paramserver.server import Server

_log = logging.getLogger("paramserver")

#: How long a signal may go unheard, in seconds.
SIGNAL_S = 0.5


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m paramserver",
        description="Holds and updates parameters. What to hold comes by RPC, from the chief.",
        epilog="python -m paramserver bench --ps HOST:PORT tests the link to one that runs.",
        allow_abbrev=False,
    )
    add = p.add_argument
    add("--port", type=int, help=f"port to listen on, 0 for any (default {cluster.DEFAULT_PORT})")
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default %(default)s: only this"
        " machine; there is no authentication, so open it to networks you trust only)",
    )
    add(
        "--lease",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds without a heartbeat after which a worker is dropped (default %(default)g)",
    )
    add(
        "--max-workers",
        type=int,
        default=64,
        metavar="N",
        help="workers that may wait at one time (default %(default)d)",
    )
    add(
        "--max-bytes",
        type=int,
        default=1 << 40,
        metavar="B",
        help="largest total of variables and slots (default 1 TiB)",
    )
    add(
        "--max-in-flight",
        type=int,
        default=4 << 30,
        metavar="B",
        help="largest total of gradients not yet applied (default 4 GiB)",
    )
    add(
        "--keepalive",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds of silence after which a connection is tested (default %(default)g)",
    )
    add(
        "--exit-when-done",
        action="store_true",
        help="exit 0 when the chief says that the job is done and every worker knows",
    )
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return p


def settings_from(args: argparse.Namespace) -> HostSettings:
    """Checks the flags. Raises: ConfigError, one line for each rule."""
    for flag, value, lowest in (
        ("--lease", args.lease, 0.05),
        ("--keepalive", args.keepalive, 0.05),
        ("--max-workers", args.max_workers, 1),
        ("--max-bytes", args.max_bytes, 1),
        ("--max-in-flight", args.max_in_flight, 1),
    ):
        if not lowest <= value < float("inf"):
            raise ConfigError(f"{flag} must be at least {lowest:g}, not {value:g}")
    return HostSettings(
        lease_s=args.lease,
        max_workers=args.max_workers,
        max_in_flight=args.max_in_flight,
        limits=Limits(total_bytes=args.max_bytes),
    )


def serve(args: argparse.Namespace) -> int:
    """Serves until a signal, Shutdown, or the end of the job. The exit code. Raises:
    ConfigError."""
    keep_large_blocks()
    resolved = cluster.resolve("ps", port=args.port)
    for warning in resolved.warnings:
        _log.warning("%s", warning)
    server = Server(
        resolved.port if resolved.port is not None else cluster.DEFAULT_PORT,
        args.host,
        settings_from(args),
        keepalive_s=args.keepalive,
    )
    end = threading.Event()
    why: list[str] = []

    def on_signal(number: int, _: object) -> None:
        if why:
            os._exit(130)
        why.append(signal.Signals(number).name)
        end.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    for event, reason in (
        (server.host.shutdown_now, "shutdown"),
        *(((server.host.finished, "the job is done"),) if args.exit_when_done else ()),
    ):
        threading.Thread(target=_forward, args=(event, reason, why, end), daemon=True).start()
    print(f"ps serving on {server.address}", flush=True)
    # Woken now and then: a signal that another thread gets does not end an untimed wait.
    while not end.wait(SIGNAL_S):
        pass
    _log.info("event=stop reason=%r", why[0])
    server.stop(f"the parameter server is shutting down ({why[0]})")
    return 70 if server.defect else 0


def _forward(event: threading.Event, reason: str, why: list[str], end: threading.Event) -> None:
    event.wait()
    if not why:
        why.append(reason)
    end.set()


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["bench"]:
        from paramserver import bench  # a client, which a server needs not

        return bench.main(argv[1:])
    args = parser().parse_args(argv)
    logging.basicConfig(
        level=args.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname).1s %(name)s %(message)s",
    )
    try:
        return serve(args)
    except ConfigError as error:
        print(f"paramserver: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
