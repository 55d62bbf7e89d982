"""Who is where: host:port, TensorFlow's cluster notation, and TF_CONFIG merged with the flags.

No sockets and no name look-ups here: text comes in, values or a one-line `ConfigError` go out. This
is the stop before the first call: every role asks `resolve` what it is and whom to speak to. All
values are immutable and safe to share.
"""

from __future__ import annotations

import ipaddress
import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from paramserver.errors import ConfigError

Role = Literal["ps", "worker", "chief"]

#: The jobs of a cluster; "master", an older word for chief, is read as chief.
JOBS = ("chief", "worker", "ps", "evaluator")

#: How each role is started.
COMMANDS: Mapping[str, str] = {
    "ps": "python -m paramserver",
    "worker": "python -m worker",
    "chief": "python -m chief",
}

#: Where a parameter server listens when neither --port nor TF_CONFIG says so.
DEFAULT_PORT = 1681

_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")
_NUMBER = re.compile(r"[0-9]{1,9}")

T = TypeVar("T")


@dataclass(frozen=True)
class Address:
    """A host (a name, IPv4, or IPv6 without brackets) and a port; `parse` and `listening` check."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, what: str = "address") -> Address:
        """Reads "host:port", "[::1]:1681", or gRPC's "ipv4:", "ipv6:", "dns:" before one of them.

        Names are lower-cased and IP addresses put in their usual form, so that equal means equal.
        `what` is the flag or key that an error names. Raises: ConfigError."""
        bare, scheme = _without_scheme(text.strip())
        if "/" in bare:
            raise ConfigError(f"{what}: {_show(text)} is not host:port (no scheme, no path)")
        host, colon, port = bare.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        if not bracketed and bare.count(":") > 1:
            raise ConfigError(f"{what}: {_show(text)}: write an IPv6 address as {_bracketed(bare)}")
        if not colon or not host or (bare.startswith("[") and not bracketed):
            raise ConfigError(f"{what}: {_show(text)} is not host:port")
        if not _NUMBER.fullmatch(port) or not 1 <= int(port) <= 65535:
            raise ConfigError(f"{what}: {_show(text)}: port {_show(port)} is not in 1..65535")
        if scheme == "ipv6":
            host = host.replace("%25", "%")  # a URI escapes the % before a zone
        parsed = cls(_host(host, f"{what}: {_show(text)}"), int(port))
        if scheme and scheme != "dns" and not parsed.target.startswith(scheme):
            raise ConfigError(f"{what}: {_show(text)} is not an {scheme} address")
        return parsed

    @classmethod
    def listening(cls, host: str, port: int) -> Address:
        """Where a server shall listen; port 0 lets the system choose. "::1" needs no brackets here.

        Raises: ConfigError."""
        return cls(_host(host, f"host {_show(host)}"), _in_range("port", port, 0, 65535))

    def __str__(self) -> str:
        """The form that can be pasted back, and that a gRPC server binds."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def target(self) -> str:
        """What a gRPC channel dials. Never bare: "dns:1681" would be a scheme, not a host.

        Only channels take it; a server binds `str(address)`."""
        if ":" in self.host:
            return f"ipv6:{self}".replace("%", "%25")
        return f"ipv4:{self}" if _is_ip(self.host) else f"dns:///{self}"


def parse_hosts(hosts: str | Sequence[str | Address], what: str = "address") -> tuple[Address, ...]:
    """Reads "a:1,b:2" or a sequence of addresses, in their order; at least one, each once.

    `what` is the flag or key that an error names. Raises: ConfigError."""
    if not isinstance(hosts, Sequence) or not hosts:
        raise ConfigError(f"{what}: {_show(hosts)} is not a list of host:port")
    entries: Sequence[object] = hosts.split(",") if isinstance(hosts, str) else hosts
    found: list[Address] = []
    for i, entry in enumerate(entries):
        name = what if isinstance(hosts, str) else f"{what}[{i}]"
        if isinstance(hosts, str) and not str(entry).strip():
            raise ConfigError(f"{what}: entry {i + 1} of {_show(hosts)} is empty")
        if not isinstance(entry, str | Address):
            raise ConfigError(f"{name}: {_show(entry)} is not host:port")
        address = entry if isinstance(entry, Address) else Address.parse(entry, name)
        if address in found:
            raise ConfigError(f"{name}: {_show(str(address))} is there twice; name each once")
        found.append(address)
    return tuple(found)


@dataclass(frozen=True)
class Task:
    """One process of a cluster: its job and its index there."""

    type: str
    index: int

    def __str__(self) -> str:
        return f"{self.type}:{self.index}"


@dataclass(frozen=True, init=False, repr=False)
class ClusterSpec:
    """All processes of a job, TensorFlow's way: `ClusterSpec({"ps": [...], "worker": [...]})`.

    A job's tasks are a list of host:port (or `{index: host:port}` without gaps). Without a chief,
    worker 0 is chief. Evaluators are kept but never counted.

    Raises: ConfigError, naming key and value."""

    ps: tuple[Address, ...]
    workers: tuple[Address, ...]
    chief: Address | None
    evaluators: tuple[Address, ...]

    def __init__(self, cluster: Mapping[str, object], what: str = "cluster") -> None:
        jobs: dict[str, tuple[Address, ...]] = {}
        owner: dict[Address, str] = {}
        for key, tasks in cluster.items():
            job, name = _job(key, f"{what}: key"), f"{what}.{key}"
            if job in jobs:
                raise ConfigError(f"{what}: 'master' and 'chief' both name the chief; keep 'chief'")
            jobs[job] = _tasks(tasks, name)
            if job == "chief" and len(jobs[job]) > 1:
                raise ConfigError(f"{name}: {_shown(jobs[job])}: a job has one chief")
            for address in jobs[job]:
                if address in owner:
                    raise ConfigError(f"{name}: {_show(str(address))} is in {owner[address]!r} too")
                owner[address] = key
        object.__setattr__(self, "ps", jobs.get("ps", ()))
        object.__setattr__(self, "workers", jobs.get("worker", ()))
        object.__setattr__(self, "chief", next(iter(jobs.get("chief", ())), None))
        object.__setattr__(self, "evaluators", jobs.get("evaluator", ()))

    @classmethod
    def from_tf_config(cls, environ: Mapping[str, str] | None = None) -> ClusterSpec:
        """The cluster that the environment's TF_CONFIG describes (see `tf_config`).

        Raises: ConfigError, also when TF_CONFIG is not set."""
        config = tf_config(environ)
        if config is None:
            raise ConfigError("TF_CONFIG is not set; set it, or write ClusterSpec({...})")
        return config.cluster

    @property
    def num_workers(self) -> int:
        """How many workers train: neither the chief nor an evaluator is one."""
        return len(self.workers)

    def job_tasks(self, job: str) -> list[str]:
        """The host:port of a job's tasks by index, empty if the cluster has none. Yours to change.

        Raises: ConfigError for an unknown job."""
        return self.as_dict().get(_job(job, "job"), [])

    def as_dict(self) -> dict[str, list[str]]:
        """The jobs that have tasks, in the form that the constructor reads. Yours to change."""
        chief = (self.chief,) if self.chief else ()
        jobs = zip(JOBS, (chief, self.workers, self.ps, self.evaluators), strict=True)
        return {job: [str(address) for address in tasks] for job, tasks in jobs if tasks}

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()})"


@dataclass(frozen=True)
class TFConfig:
    """What TF_CONFIG says: the whole cluster, and which task of it this process is."""

    cluster: ClusterSpec
    task: Task


def tf_config(environ: Mapping[str, str] | None = None) -> TFConfig | None:
    """Reads TF_CONFIG from `environ` (default: the process's); None if it is unset, empty or "{}".

    Keys other than "cluster" and "task" are ignored. Raises: ConfigError, naming key and value."""
    if environ is None:
        # Read at the call, so that importing this module touches nothing of the process.
        import os

        environ = os.environ
    text = environ.get("TF_CONFIG", "")
    if not text.strip():
        return None
    try:
        config = json.loads(text, object_pairs_hook=_each_key_once)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"TF_CONFIG: {_show(text)} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"TF_CONFIG: {_show(config)} is not a JSON object")
    if not config:
        return None
    for key, example in (
        ("cluster", '{"ps": ["host:port"], "worker": ["host:port"]}'),
        ("task", '{"type": "worker", "index": 0}'),
    ):
        if key not in config:
            raise ConfigError(f'TF_CONFIG has no "{key}"; add "{key}": {example}')
        if not isinstance(config[key], dict):
            raise ConfigError(f"TF_CONFIG {key}: {_show(config[key])} is not like {example}")
    cluster = ClusterSpec(config["cluster"], "TF_CONFIG cluster")
    return TFConfig(cluster, _task(config["task"], cluster))


@dataclass(frozen=True)
class Resolved:
    """What one process is and whom it speaks to, from flags and TF_CONFIG. Log the `warnings`."""

    role: Role
    #: The parameter servers, in the order given; empty only for a ps, which calls nobody.
    ps: tuple[Address, ...]
    #: Index among those of the same role; 0 for the chief.
    task_index: int
    #: Into how many parts the data is cut.
    num_workers: int
    #: Who was named chief, in TensorFlow's notation; nothing need listen there.
    chief: Address | None
    #: ps only: where to listen; 0 lets the system choose.
    port: int | None = None
    #: What TF_CONFIG calls this process; None without TF_CONFIG.
    address: Address | None = None
    warnings: tuple[str, ...] = field(default=(), compare=False)

    @property
    def name(self) -> str:
        """Role and index, "worker:0"."""
        return f"{self.role}:{self.task_index}"

    @property
    def may_be_chief(self) -> bool:
        """Whether it claims the chief's lease: the chief does, else worker 0 if none is named."""
        return self.role == "chief" or (self.name == "worker:0" and self.chief is None)


def resolve(
    role: Role,
    *,
    ps: str | Sequence[str | Address] | None = None,
    task_index: int | None = None,
    workers: int | None = None,
    chief: str | None = None,
    port: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> Resolved:
    """Merges flags (None: not given) with TF_CONFIG. The flags win, and one warning says over what.

    Without either: index 0, 1 worker, no chief named (so worker 0 is chief), DEFAULT_PORT.
    `environ`: see `tf_config`. Raises: ConfigError for a wrong flag or TF_CONFIG, a TF_CONFIG that
    makes this process another role, or when nobody names a parameter server."""
    config = tf_config(environ)
    if config and config.task.type != role:
        command = COMMANDS.get(config.task.type)
        remedy = f"run `{command}`" if command else "an evaluator takes no part; run nothing"
        raise ConfigError(
            f"TF_CONFIG task.type: {config.task.type!r}, but this is `{COMMANDS[role]}`; "
            f"{remedy} here, or unset TF_CONFIG"
        )
    if role == "chief" and config and not config.cluster.workers and workers is None:
        raise ConfigError("TF_CONFIG cluster has no 'worker'; add them, or give --workers")

    overruled: list[str] = []

    def pick(flag: str, given: T | None, key: str, told: T | None) -> T | None:
        if given is not None and told is not None and given != told:
            overruled.append(f"{flag} {_shown(given)} (TF_CONFIG {key}: {_shown(told)})")
        return told if given is None else given

    cluster, task = (config.cluster, config.task) if config else (ClusterSpec({}), Task(role, 0))
    own = Address.parse(cluster.job_tasks(role)[task.index]) if config else None
    given_ps = None if ps is None else parse_hosts(ps, "--ps")
    same_ps = given_ps is not None and set(given_ps) == set(cluster.ps)  # order says nothing
    servers = pick("--ps", given_ps, "cluster.ps", None if same_ps else cluster.ps or None)
    if not servers and role != "ps":
        also = ", or add 'ps' to TF_CONFIG cluster" if config else ""
        raise ConfigError(f"no parameter server is named: give --ps host:port[,host:port]{also}")
    index = pick(
        "--task-index",
        None if task_index is None else _in_range("--task-index", task_index, 0),
        "task.index",
        task.index if config else None,
    )
    if role == "chief" and index:
        raise ConfigError(f"--task-index {index}: a job has one chief, index 0")
    count = pick(
        "--workers",
        None if workers is None else _in_range("--workers", workers, 1),
        "cluster.worker",
        cluster.num_workers or None,
    )
    named = pick(
        "--chief",
        None if chief is None else Address.parse(chief, "--chief"),
        "cluster.chief",
        cluster.chief,
    )
    listen = None
    if role == "ps":
        listen = pick(
            "--port",
            None if port is None else _in_range("--port", port, 0, 65535),
            f"cluster.ps[{task.index}]",
            own.port if own else None,
        )
        listen = DEFAULT_PORT if listen is None else listen
    warning = f"flags win over TF_CONFIG: {'; '.join(overruled)}"
    return Resolved(
        role,
        servers or (),
        index or 0,
        count or 1,
        named,
        listen,
        own,
        (warning,) if overruled else (),
    )


def _without_scheme(text: str) -> tuple[str, str]:
    """Splits "ipv4:", "ipv6:" or "dns:" off, unless it is the host of a plain "dns:1681"."""
    scheme, _, rest = text.partition(":")
    if scheme in ("ipv4", "ipv6", "dns") and ":" in rest:
        return rest.removeprefix("///") if scheme == "dns" else rest, scheme
    return text, ""


def _host(text: str, what: str) -> str:
    """A host in its usual form: lower case, IPs canonical, no brackets."""
    bracketed = text.startswith("[") and text.endswith("]")
    bare = (text[1:-1] if bracketed else text).lower()
    if bracketed or ":" in bare:
        try:
            return str(ipaddress.IPv6Address(bare))
        except ValueError as error:
            raise ConfigError(f"{what}: {_show(bare)} is not an IPv6 address") from error
    if re.fullmatch(r"[0-9.]+", bare):
        if not _is_ip(bare):
            raise ConfigError(f"{what}: {_show(bare)} is not an IPv4 address")
        return bare
    if len(bare) > 254 or not _NAME.fullmatch(bare):
        raise ConfigError(f"{what}: {_show(bare)} is not a host name (letters, digits and - . _)")
    # A final dot says "no search list". On a bare "localhost." it only keeps hosts files from
    # matching, so it goes; on a full name it stays.
    return bare.removesuffix(".") if bare.count(".") == 1 else bare


def _is_ip(host: str) -> bool:
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True


def _bracketed(text: str) -> str:
    """What somebody who wrote "::1:1681" or "::1" most likely meant."""
    host, _, port = text.rpartition(":")
    for guess, number in ((host, port), (text, "PORT")):
        try:
            return f"[{ipaddress.IPv6Address(guess)}]:{number}"
        except ValueError:
            continue
    return "[::1]:1681"


def _job(name: object, what: str) -> str:
    if name == "master":
        return "chief"
    if isinstance(name, str) and name in JOBS:
        return name
    meant = [job for job in (*JOBS, "master") if str(name).lower().startswith(job)]
    remedy = f"write {meant[0]!r}" if meant else f"choose one of {', '.join(JOBS)}"
    raise ConfigError(f"{what} {_show(name)} is not known; {remedy}")


def _tasks(tasks: object, what: str) -> tuple[Address, ...]:
    """A job's tasks by index. An empty list is a job without tasks."""
    if isinstance(tasks, Mapping):
        by_index = {str(index): address for index, address in tasks.items()}
        for i in range(len(tasks)):
            if str(i) not in by_index:
                raise ConfigError(f"{what}: index {i} is missing in {_show(list(by_index))}")
        tasks = [by_index[str(i)] for i in range(len(tasks))]
    if isinstance(tasks, list | tuple):
        return parse_hosts(tasks, what) if tasks else ()
    raise ConfigError(f"{what}: {_show(tasks)} is not a list of host:port")


def _task(task: Mapping[str, object], cluster: ClusterSpec) -> Task:
    for key in ("type", "index"):
        if key not in task:
            raise ConfigError(f'TF_CONFIG task has no "{key}"; it is {_show(task)}')
    job, index = _job(task["type"], "TF_CONFIG task.type:"), task["index"]
    if isinstance(index, str) and _NUMBER.fullmatch(index):
        index = int(index)
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise ConfigError(f"TF_CONFIG task.index: {_show(index)} is not a number from 0 up")
    count = len(cluster.job_tasks(job))
    if not count and job != "evaluator":
        raise ConfigError(f"TF_CONFIG task.type: {job!r}, but the cluster has no {job!r}")
    if count and index >= count:
        raise ConfigError(
            f"TF_CONFIG task.index: {index}, but cluster.{job} ends at index {count - 1}"
        )
    return Task(job, index)


def _each_key_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """JSON lets a key come twice and the last one win: refuse it instead."""
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"TF_CONFIG: key {_show(key)} is there twice")
        found[key] = value
    return found


def _in_range(what: str, value: int, low: int, high: int | None = None) -> int:
    if value < low or (high is not None and value > high):
        allowed = f"{low} or more" if high is None else f"{low}..{high}"
        raise ConfigError(f"{what} {value} is not in range; give {allowed}")
    return value


def _shown(value: object) -> str:
    """A value as it would be written on the command line."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _show(value: object) -> str:
    """A value for a message: quoted, on one line, cut when it is long or deep."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    return short.repr(value)
