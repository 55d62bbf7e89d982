"""Addresses, TensorFlow's cluster notation, TF_CONFIG and flags: all of it text in, values out."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.cluster import (
    DEFAULT_PORT,
    Address,
    ClusterSpec,
    Resolved,
    Task,
    parse_hosts,
    resolve,
    tf_config,
)
from paramserver.errors import ConfigError

A, B, C = "a:1", "b:2", "c:3"


def environ(config: object) -> dict[str, str]:
    return {"TF_CONFIG": config if isinstance(config, str) else json.dumps(config)}


def tf(cluster: object, job: str = "worker", index: object = 0) -> dict[str, str]:
    return environ({"cluster": cluster, "task": {"type": job, "index": index}})


CLUSTER = {"ps": [A, B], "worker": [C, "d:4"]}


# Addresses


@pytest.mark.parametrize(
    ("text", "shown", "target"),
    [
        ("localhost:1681", "localhost:1681", "dns:///localhost:1681"),
        (" LocalHost:1681 ", "localhost:1681", "dns:///localhost:1681"),
        ("localhost.:1681", "localhost:1681", "dns:///localhost:1681"),
        ("PS-0.Example.COM.:1", "ps-0.example.com.:1", "dns:///ps-0.example.com.:1"),
        ("my_ps:65535", "my_ps:65535", "dns:///my_ps:65535"),
        ("127.0.0.1:1681", "127.0.0.1:1681", "ipv4:127.0.0.1:1681"),
        ("ipv4:127.0.0.1:1681", "127.0.0.1:1681", "ipv4:127.0.0.1:1681"),
        ("[::1]:1681", "[::1]:1681", "ipv6:[::1]:1681"),
        ("[0:0::0:1]:1681", "[::1]:1681", "ipv6:[::1]:1681"),
        ("ipv6:[::1]:1681", "[::1]:1681", "ipv6:[::1]:1681"),
        ("[fe80::1%eth0]:1681", "[fe80::1%eth0]:1681", "ipv6:[fe80::1%25eth0]:1681"),
        ("ipv6:[fe80::1%25eth0]:1681", "[fe80::1%eth0]:1681", "ipv6:[fe80::1%25eth0]:1681"),
        ("dns:1681", "dns:1681", "dns:///dns:1681"),
        ("ipv4:1681", "ipv4:1681", "dns:///ipv4:1681"),
        ("unix:1681", "unix:1681", "dns:///unix:1681"),
        ("dns:dns:1681", "dns:1681", "dns:///dns:1681"),
        ("dns:///ps:1681", "ps:1681", "dns:///ps:1681"),
        ("dns:///[::1]:1681", "[::1]:1681", "ipv6:[::1]:1681"),
    ],
)
def test_an_address_can_be_read_shown_and_dialled(text: str, shown: str, target: str) -> None:
    address = Address.parse(text)
    assert str(address) == shown
    assert address.target == target
    assert Address.parse(shown) == Address.parse(target) == address


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "--ps: '' is not host:port"),
        ("localhost", "--ps: 'localhost' is not host:port"),
        (":1681", "--ps: ':1681' is not host:port"),
        ("1681", "--ps: '1681' is not host:port"),
        ("[::1]", "--ps: '[::1]': write an IPv6 address as [::1]:1681"),
        ("[::1", "--ps: '[::1': write an IPv6 address as [::1]:1681"),
        ("[::1]1681", "--ps: '[::1]1681': write an IPv6 address as [::1]:1681"),
        ("::1:1681", "--ps: '::1:1681': write an IPv6 address as [::1]:1681"),
        ("::1", "--ps: '::1': write an IPv6 address as [::1]:PORT"),
        ("fe80::7:1681", "--ps: 'fe80::7:1681': write an IPv6 address as [fe80::7]:1681"),
        ("a:b:1", "--ps: 'a:b:1': write an IPv6 address as [::1]:1681"),
        ("ipv6:::1:1681", "--ps: 'ipv6:::1:1681': write an IPv6 address as [::1]:1681"),
        ("[nope]:1", "--ps: '[nope]:1': 'nope' is not an IPv6 address"),
        ("ipv4:localhost:1", "--ps: 'ipv4:localhost:1' is not an ipv4 address"),
        ("ipv6:127.0.0.1:1", "--ps: 'ipv6:127.0.0.1:1' is not an ipv6 address"),
        ("h:0", "--ps: 'h:0': port '0' is not in 1..65535"),
        ("h:70000", "--ps: 'h:70000': port '70000' is not in 1..65535"),
        ("h:abc", "--ps: 'h:abc': port 'abc' is not in 1..65535"),
        ("h:-1", "--ps: 'h:-1': port '-1' is not in 1..65535"),
        ("h:", "--ps: 'h:': port '' is not in 1..65535"),
        ("h:\u0661", "--ps: 'h:\u0661': port '\u0661' is not in 1..65535"),
        ("http://h:80", "--ps: 'http://h:80' is not host:port (no scheme, no path)"),
        ("unix:/tmp/s", "--ps: 'unix:/tmp/s' is not host:port (no scheme, no path)"),
        ("300.1.1.1:1", "--ps: '300.1.1.1:1': '300.1.1.1' is not an IPv4 address"),
        ("127.1:1", "--ps: '127.1:1': '127.1' is not an IPv4 address"),
        ("a b:1", "--ps: 'a b:1': 'a b' is not a host name"),
        ("a..b:1", "--ps: 'a..b:1': 'a..b' is not a host name"),
        ("-a:1", "--ps: '-a:1': '-a' is not a host name"),
        ("a\nb:1", r"--ps: 'a\nb:1': 'a\nb' is not a host name"),
        ("b\xfccher:1", "--ps: 'b\xfccher:1': 'b\xfccher' is not a host name"),
    ],
)
def test_a_wrong_address_is_refused_by_flag_and_value(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Address.parse(text, "--ps")
    assert str(refusal.value).startswith(says)


@settings(deadline=None, max_examples=300)
@given(st.text(max_size=40) | st.text(alphabet="a1.:[]%/,-", max_size=20))
def test_whatever_is_read_is_an_address_or_one_line(text: str) -> None:
    try:
        addresses = parse_hosts(text, "--ps")
    except ConfigError as refusal:
        assert str(refusal).startswith("--ps")
        assert len(str(refusal).splitlines()) == 1
    else:
        assert parse_hosts(",".join(map(str, addresses))) == addresses
        assert parse_hosts([a.target for a in addresses]) == addresses


@pytest.mark.parametrize(
    ("host", "port", "shown"),
    [("127.0.0.1", 0, "127.0.0.1:0"), ("::", 1681, "[::]:1681"), ("[::1]", 0, "[::1]:0")],
)
def test_a_server_may_listen_on_port_0(host: str, port: int, shown: str) -> None:
    assert str(Address.listening(host, port)) == shown


@pytest.mark.parametrize(
    ("host", "port", "says"),
    [
        ("127.0.0.1", 65536, "port 65536 is not in range; give 0..65535"),
        ("127.0.0.1", -1, "port -1 is not in range; give 0..65535"),
        ("", 1, "host '': '' is not a host name"),
        ("h:1", 1, "host 'h:1': 'h:1' is not an IPv6 address"),
    ],
)
def test_where_nobody_can_listen_is_refused(host: str, port: int, says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Address.listening(host, port)
    assert str(refusal.value).startswith(says)


@pytest.mark.parametrize(
    ("listens", "dialled"),
    [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "LocalHost."), ("::1", "[0::1]")],
)
def test_grpc_binds_and_dials_what_an_address_says(listens: str, dialled: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool, options=[("grpc.so_reuseport", 0)])
        try:
            port = server.add_insecure_port(str(Address.listening(listens, 0)))
        except RuntimeError:
            pytest.skip(f"this machine has no {listens}")
        server.start()
        target = Address.parse(f"{dialled}:{port}").target
        with grpc.insecure_channel(target, [("grpc.enable_http_proxy", 0)]) as channel:
            call: Any = channel.unary_unary("/none/None")
            with pytest.raises(grpc.RpcError) as answer:
                call(b"", timeout=30)
            assert answer.value.code() == grpc.StatusCode.UNIMPLEMENTED
        server.stop(None).wait(30)


# Lists


def test_hosts_keep_their_order_in_every_form() -> None:
    expected = (Address("b", 2), Address("a", 1))
    assert parse_hosts("b:2, a:1") == expected
    assert parse_hosts(["b:2", "a:1"]) == expected
    assert parse_hosts(expected) == expected
    assert str(parse_hosts("127.0.0.1:1681,[::1]:1682")[1]) == "[::1]:1682"


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        ("", "--ps: '' is not a list of host:port"),
        ("a:1,", "--ps: entry 2 of 'a:1,' is empty"),
        ("a:1,,b:2", "--ps: entry 2 of 'a:1,,b:2' is empty"),
        ("a:1,A:1", "--ps: 'a:1' is there twice"),
        ("[::1]:1,[0::1]:1", "--ps: '[::1]:1' is there twice"),
        ([], "--ps: [] is not a list of host:port"),
        ([""], "--ps[0]: '' is not host:port"),
        (["a:1", "a:1"], "--ps[1]: 'a:1' is there twice"),
        (["a:1", "b:2,c:3"], "--ps[1]: 'b:2,c:3': write an IPv6"),
        (["a:1", 7], "--ps[1]: 7 is not host:port"),
        (7, "--ps: 7 is not a list of host:port"),
    ],
)
def test_a_wrong_list_is_refused_by_flag_and_value(hosts: Any, says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_hosts(hosts, "--ps")
    assert str(refusal.value).startswith(says)


# ClusterSpec


def test_a_cluster_is_read_and_written_in_tensorflows_notation() -> None:
    notation = {"chief": ["e:5"], "worker": [C, "d:4"], "ps": [A, B], "evaluator": ["f:6"]}
    spec = ClusterSpec(notation)
    assert spec.ps == (Address("a", 1), Address("b", 2))
    assert spec.chief == Address("e", 5)
    assert spec.num_workers == 2  # neither the chief nor the evaluator
    assert spec.as_dict() == notation
    assert spec == ClusterSpec(spec.as_dict())
    assert repr(spec) == f"ClusterSpec({notation})"
    assert hash(spec) == hash(ClusterSpec(notation))
    assert spec.job_tasks("worker") == [C, "d:4"]
    assert spec.job_tasks("master") == ["e:5"]
    assert ClusterSpec({"ps": [A], "worker": []}).job_tasks("worker") == []


def test_tasks_may_be_named_by_index() -> None:
    assert ClusterSpec({"ps": {"1": B, "0": A}}) == ClusterSpec({"ps": [A, B]})
    with pytest.raises(ConfigError, match=r"^cluster.worker: index 0 is missing in \['1'\]"):
        ClusterSpec({"worker": {"1": A}})


def test_master_is_read_as_chief() -> None:
    assert ClusterSpec({"master": [A]}) == ClusterSpec({"chief": [A]})


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        ({"ps_hosts": [A]}, "cluster: key 'ps_hosts' is not known; write 'ps'"),
        ({"worker_hosts": [A]}, "cluster: key 'worker_hosts' is not known; write 'worker'"),
        ({"Worker": [A]}, "cluster: key 'Worker' is not known; write 'worker'"),
        ({"gpu": [A]}, "cluster: key 'gpu' is not known; choose one of chief, worker, ps"),
        ({"ps": [""]}, "cluster.ps[0]: '' is not host:port"),
        ({"ps": ["h"]}, "cluster.ps[0]: 'h' is not host:port"),
        ({"ps": ["h:0"]}, "cluster.ps[0]: 'h:0': port '0' is not in 1..65535"),
        ({"ps": [A, "h:70000"]}, "cluster.ps[1]: 'h:70000': port '70000' is not in"),
        ({"ps": ["h:abc"]}, "cluster.ps[0]: 'h:abc': port 'abc' is not in"),
        ({"ps": [A, A]}, "cluster.ps[1]: 'a:1' is there twice"),
        ({"ps": [A], "worker": [B, A]}, "cluster.worker: 'a:1' is in 'ps' too"),
        ({"ps": A}, "cluster.ps: 'a:1' is not a list of host:port"),
        ({"ps": None}, "cluster.ps: None is not a list of host:port"),
        ({"ps": [[A]]}, "cluster.ps[0]: ['a:1'] is not host:port"),
        ({"chief": [A, B]}, "cluster.chief: a:1,b:2: a job has one chief"),
        ({"chief": [A], "master": [B]}, "cluster: 'master' and 'chief' both name the chief"),
    ],
)
def test_a_wrong_cluster_is_refused_by_key_and_value(
    cluster: Mapping[str, object], says: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        ClusterSpec(cluster)
    assert str(refusal.value).startswith(says)
    with pytest.raises(ConfigError) as refusal:
        ClusterSpec.from_tf_config(tf(cluster))
    assert str(refusal.value).startswith(f"TF_CONFIG {says}")


# TF_CONFIG


@pytest.mark.parametrize("text", ["", " \n", "{}"])
def test_an_empty_tf_config_is_none(text: str) -> None:
    assert tf_config({"TF_CONFIG": text}) is None
    assert tf_config({}) is None
    with pytest.raises(ConfigError, match=r"^TF_CONFIG is not set"):
        ClusterSpec.from_tf_config({"TF_CONFIG": text})


def test_tf_config_is_read_from_the_process_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in tf(CLUSTER).items():
        monkeypatch.setenv(name, value)
    assert ClusterSpec.from_tf_config() == ClusterSpec(CLUSTER)
    assert resolve("worker", environ=os.environ) == resolve("worker")


@pytest.mark.parametrize(
    ("job", "index", "task"),
    [
        ("ps", 1, Task("ps", 1)),
        ("worker", "0", Task("worker", 0)),
        ("evaluator", 3, Task("evaluator", 3)),  # not in the cluster, and that is right
    ],
)
def test_the_task_is_read(job: str, index: object, task: Task) -> None:
    config = tf_config(tf(CLUSTER, job, index))
    assert config is not None
    assert config.task == task
    assert config.cluster.num_workers == 2


@pytest.mark.parametrize("key", ["master", "chief"])
@pytest.mark.parametrize("job", ["master", "chief"])
def test_a_master_task_is_the_chief(key: str, job: str) -> None:
    config = tf_config(tf({**CLUSTER, key: ["e:5"]}, job))
    assert config is not None
    assert str(config.task) == "chief:0"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{ps: 1}", "TF_CONFIG: '{ps: 1}' is not JSON"),
        ("[" * 100_000, "TF_CONFIG: '[["),
        ("1" * 5_000, "TF_CONFIG: '11"),
        ([], "TF_CONFIG: [] is not a JSON object"),
        ([[[[[[[[[[A]]]]]]]]]], "TF_CONFIG: [[[[[["),
        ("null", "TF_CONFIG: None is not a JSON object"),
        ({"task": {"type": "worker", "index": 0}}, 'TF_CONFIG has no "cluster"; add'),
        ({"cluster": CLUSTER}, 'TF_CONFIG has no "task"; add "task": {"type": "worker"'),
        ({"cluster": [A], "task": {}}, "TF_CONFIG cluster: ['a:1'] is not like {"),
        ({"cluster": CLUSTER, "task": "worker"}, "TF_CONFIG task: 'worker' is not like {"),
        ({"cluster": CLUSTER, "task": {"index": 0}}, 'TF_CONFIG task has no "type"; it is'),
        ({"cluster": CLUSTER, "task": {"type": "ps"}}, 'TF_CONFIG task has no "index"; it is'),
        (
            '{"cluster": {"ps": ["a:1"], "ps": ["b:2"]}, "task": {}}',
            "TF_CONFIG: key 'ps' is there twice",
        ),
    ],
)
def test_a_broken_tf_config_is_refused_by_key(config: object, says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        tf_config(environ(config))
    assert str(refusal.value).startswith(says)
    assert len(str(refusal.value)) < 400
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("job", "index", "says"),
    [
        ("Worker", 0, "type: 'Worker' is not known; write 'worker'"),
        ("gpu", 0, "type: 'gpu' is not known; choose one of"),
        ("chief", 0, "type: 'chief', but the cluster has no 'chief'"),
        ("worker", -1, "index: -1 is not a number from 0 up"),
        ("evaluator", -1, "index: -1 is not a number from 0 up"),
        ("worker", 5, "index: 5, but cluster.worker ends at index 1"),
        ("ps", 2, "index: 2, but cluster.ps ends at index 1"),
        ("worker", "5", "index: 5, but cluster.worker ends at index 1"),
        ("worker", "-1", "index: '-1' is not a number from 0 up"),
        ("worker", "zero", "index: 'zero' is not a number from 0 up"),
        ("worker", 0.5, "index: 0.5 is not a number from 0 up"),
        ("worker", True, "index: True is not a number from 0 up"),
        ("worker", None, "index: None is not a number from 0 up"),
    ],
)
def test_a_wrong_task_is_refused_by_key_and_value(job: str, index: object, says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        tf_config(tf(CLUSTER, job, index))
    assert str(refusal.value).startswith(f"TF_CONFIG task.{says}")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["ps", "worker", "type", "index"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=300)
@given(
    json_values
    | st.fixed_dictionaries({"cluster": json_values, "task": json_values})
    | st.fixed_dictionaries({"cluster": st.just(CLUSTER), "task": json_values})
)
def test_no_tf_config_breaks_the_reader(config: object) -> None:
    try:
        tf_config(environ(json.dumps(config)))
    except ConfigError as refusal:
        assert str(refusal).startswith("TF_CONFIG")
        assert "\n" not in str(refusal)


# Flags and TF_CONFIG together


def test_the_bare_commands_resolve() -> None:
    worker = resolve("worker", ps="localhost:1681", environ={})
    assert worker == Resolved("worker", (Address("localhost", 1681),), 0, 1, None)
    assert worker.name == "worker:0"
    assert worker.may_be_chief
    server = resolve("ps", environ={})
    assert server == Resolved("ps", (), 0, 1, None, port=DEFAULT_PORT)
    assert not server.may_be_chief


def test_tf_config_alone_is_enough() -> None:
    cluster = {**CLUSTER, "chief": ["e:5"], "evaluator": ["f:6"]}
    worker = resolve("worker", environ=tf(cluster, "worker", 1))
    assert (worker.ps, worker.task_index, worker.num_workers, worker.chief) == (
        parse_hosts([A, B]),
        1,
        2,
        Address("e", 5),
    )
    chief = resolve("chief", environ=tf(cluster, "chief"))
    assert (chief.name, chief.num_workers, chief.may_be_chief) == ("chief:0", 2, True)
    server = resolve("ps", environ=tf(cluster, "ps", 1))
    assert (server.name, server.port, server.address) == ("ps:1", 2, Address("b", 2))
    assert worker.warnings == chief.warnings == server.warnings == ()


@pytest.mark.parametrize(
    ("chief", "index", "may"),
    [(None, 0, True), (None, 1, False), ("e:5", 0, False), ("e:5", 1, False)],
)
def test_exactly_worker_0_is_chief_when_none_is_named(
    chief: str | None, index: int, may: bool
) -> None:
    by_flag = resolve("worker", ps=A, task_index=index, workers=2, chief=chief, environ={})
    cluster = {**CLUSTER, "chief": [chief]} if chief else CLUSTER
    by_environment = resolve("worker", environ=tf(cluster, "worker", index))
    assert by_flag.may_be_chief == by_environment.may_be_chief == may


def test_flags_win_and_one_line_says_over_what() -> None:
    told = tf({**CLUSTER, "chief": ["e:5"]})
    worker = resolve("worker", ps="x:9", task_index=3, workers=4, chief="y:8", environ=told)
    assert worker == Resolved(
        "worker", (Address("x", 9),), 3, 4, Address("y", 8), address=Address("c", 3)
    )
    assert worker.warnings == (
        "flags win over TF_CONFIG: --ps x:9 (TF_CONFIG cluster.ps: a:1,b:2); "
        "--task-index 3 (TF_CONFIG task.index: 0); --workers 4 (TF_CONFIG cluster.worker: 2); "
        "--chief y:8 (TF_CONFIG cluster.chief: e:5)",
    )
    server = resolve("ps", port=0, environ=tf(CLUSTER, "ps", 1))
    assert server.port == 0
    assert server.warnings == ("flags win over TF_CONFIG: --port 0 (TF_CONFIG cluster.ps[1]: 2)",)


def test_flags_that_say_the_same_are_no_contradiction() -> None:
    worker = resolve("worker", ps="B:2,a:1", task_index=0, workers=2, environ=tf(CLUSTER))
    assert worker.ps == parse_hosts("b:2,a:1")
    assert worker.warnings == ()


@pytest.mark.parametrize(
    ("role", "flags", "told", "says"),
    [
        ("worker", {}, {}, "no parameter server is named: give --ps host:port[,host:port]"),
        ("chief", {}, {}, "no parameter server is named: give --ps"),
        ("worker", {}, tf({"worker": [A]}), "no parameter server is named: give --ps"),
        ("worker", {"ps": "a:1,"}, {}, "--ps: entry 2 of 'a:1,' is empty"),
        ("worker", {"ps": ""}, tf(CLUSTER), "--ps: '' is not a list of host:port"),
        ("worker", {"ps": A, "task_index": -1}, {}, "--task-index -1 is not in range; give 0 or"),
        ("worker", {"ps": A, "workers": 0}, {}, "--workers 0 is not in range; give 1 or more"),
        ("worker", {"ps": A, "chief": "e"}, {}, "--chief: 'e' is not host:port"),
        ("chief", {"ps": A, "task_index": 1}, {}, "--task-index 1: a job has one chief"),
        ("ps", {"port": 70000}, {}, "--port 70000 is not in range; give 0..65535"),
        ("worker", {"ps": A}, environ("nope"), "TF_CONFIG: 'nope' is not JSON"),
        (
            "worker",
            {"ps": A},
            tf(CLUSTER, "ps"),
            "TF_CONFIG task.type: 'ps', but this is `python -m worker`; "
            "run `python -m paramserver` here, or unset TF_CONFIG",
        ),
        ("chief", {"ps": A}, tf(CLUSTER), "TF_CONFIG task.type: 'worker', but this is `python -m"),
        (
            "worker",
            {"ps": A},
            tf(CLUSTER, "evaluator"),
            "TF_CONFIG task.type: 'evaluator', but this is `python -m worker`; an evaluator takes",
        ),
        ("chief", {}, tf({"ps": [A], "chief": [B]}, "chief"), "TF_CONFIG cluster has no 'worker'"),
    ],
)
def test_what_cannot_be_resolved_is_refused(
    role: Any, flags: dict[str, Any], told: dict[str, str], says: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        resolve(role, environ=told, **flags)
    assert str(refusal.value).startswith(says)
