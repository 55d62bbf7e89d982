"""The benchmarks at the smallest sizes, what they conclude, and the self-test of a link."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import MakeCluster
from processes import Processes

from benchmarks import figures, plot, reach, report, transfers
from benchmarks.__main__ import SECTIONS, parser
from benchmarks.figures import Figure, Round
from benchmarks.scale import FULL, QUICK, label
from paramserver import bench
from paramserver.layout import Variable

MIB = 1 << 20


# -- what is concluded from figures ----------------------------------------------------------------


def test_a_transfer_is_a_rate_over_the_raw_sockets_rate() -> None:
    rounds = [Round([0.5], [1.0, 2.0, 9.0]), Round([1.0], [4.0]), Round([1.0], [8.0])]
    figure = figures.transfer("push", "push", rounds, nbytes=4_000_000, yard_bytes=1_000_000)
    # 2 MB/s over 2 MB/s, 1 over 1, 0.5 over 1.
    assert figure.ratio == 1.0
    assert figure.yardstick_value == 1e-3
    assert figure.values == (1000, 2000, 9000, 4000, 8000)
    assert (figure.median, figure.gb_per_s) == (4000, 1e-3)


def test_a_latency_is_a_multiple_of_the_yardsticks() -> None:
    figure = figures.latency("step", "step", [Round([1.0], [3.0, 4.0, 5.0])], "a turn")
    assert (figure.ratio, figure.median, figure.gb_per_s) == (4.0, 4000.0, None)


def test_a_figure_is_one_line() -> None:
    figure = figures.latency("step", "a step", [Round([1e-3], [4e-3])], "a turn", "warm")
    line = report.row(figure)
    assert "a step" in line and "4.00 x a turn (1.00 ms); warm" in line
    assert "\n" not in report.heading() + line


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.000"),
        (5e-5, "5.00e-05"),
        (0.1234, "0.123"),
        (1.234, "1.23"),
        (12.34, "12.3"),
        (1234.5, "1,234"),
        (2e7, "2.00e+07"),
    ],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert figures.number(value) == text


def test_sizes_have_names() -> None:
    assert [label(n) for n in (8, 4096, 100 << 10, 64 * MIB)] == [
        "8 bytes",
        "4 KiB",
        "100 KiB",
        "64 MiB",
    ]


def test_repeats_follow_the_size() -> None:
    repeats = [FULL.repeats(n) for n in FULL.sizes]
    assert repeats == sorted(repeats, reverse=True)
    assert repeats[0] == FULL.most and repeats[-1] == FULL.fewest
    assert FULL.repeats(0) == FULL.most


def test_a_workers_rate_leaves_out_what_is_cut_off() -> None:
    assert transfers.rate([0.9, 1.5, 2.5, 3.5, 9.0], begin=1.0, end=4.0) == 1.0
    assert transfers.rate([2.0], begin=1.0, end=3.0) == 0.5
    assert transfers.rate([], begin=1.0, end=3.0) == 0.0


def figure(name: str, value: float, ratio: float | None = None) -> Figure:
    return Figure("", name, "x", (value,), ratio=ratio)


def verdicts(*measured: Figure) -> dict[str, bool]:
    return {
        str(row["goal"]): bool(row["floor met"])
        for row in reach.table(FULL, measured)
        if "floor" in row
    }


def test_floors_are_floors_and_ceilings_are_ceilings() -> None:
    good = verdicts(
        figure("push 64 MiB", 99, ratio=0.50),
        figure("push + adam / push + sgd", 1.5),
        figure("push 500 variables / 1", 0.85),
        figure("digits MLP, 2 workers async", 1149),
        figure("push: 2 workers / 1", 1.0),
        figure("peak memory / variables, 256 MiB", 3.5),
    )
    bad = verdicts(
        figure("push 64 MiB", 0.1, ratio=0.49),
        figure("push + adam / push + sgd", 1.51),
        figure("push 500 variables / 1", 0.84),
        figure("digits MLP, 2 workers async", 1148),
        figure("push: 2 workers / 1", 0.99),
        figure("peak memory / variables, 256 MiB", 3.6),
    )
    assert len(good) == 6 and all(good.values())
    assert good.keys() == bad.keys() and not any(bad.values())


def test_tensorflow_measured_beside_it_takes_the_place_of_the_known_figure() -> None:
    ours, theirs = figure("pull 64 MiB", 0, ratio=0.6), figure("TensorFlow pull 64 MiB", 0, 0.7)
    assert verdicts(ours)["pull: TensorFlow's"]
    assert not verdicts(ours, theirs)["pull: TensorFlow's"]


def test_what_was_not_measured_is_not_judged() -> None:
    assert reach.table(FULL, [figure("something else", 1.0)]) == []


def test_a_quick_run_is_not_judged() -> None:
    rows = reach.table(FULL, [figure("push 64 MiB", 0, ratio=0.1)])
    assert any("NO" in line for line in report.goals(rows, quick=False))
    assert not any("NO" in line for line in report.goals(rows, quick=True))


def test_a_goal_that_nothing_measured_is_named() -> None:
    all_of_them = [figure(goal.figure, 1.0, ratio=1.0) for goal in reach.goals(FULL)]
    assert reach.unmeasured(FULL, all_of_them) == []
    most = [each for each in all_of_them if each.name != "push 64 MiB"]
    assert reach.unmeasured(FULL, most) == ["push 64 MiB"]


def test_an_unknown_section_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--only", "push,pulll"])
    assert "no section pulll" in capsys.readouterr().err
    assert parser().parse_args(["--only", "push,step"]).only == ["push", "step"]
    assert parser().parse_args([]).only == list(SECTIONS)


def test_a_plot_is_drawn_of_whatever_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rounds = [Round([1e-3], [2e-3])]
    measured = [
        figures.transfer("push", f"push {label(n)}", rounds, n, n, n) for n in (MIB, 64 * MIB)
    ]
    for some in ([], measured):
        path = tmp_path / f"{len(some)}.png"
        plot.write_png(path, some, reach.table(FULL, some), "a title")
        assert path.read_bytes().startswith(b"\x89PNG")


# -- runs ------------------------------------------------------------------------------------------


def test_a_quick_run_prints_a_table_and_writes_all_numbers(
    processes: Processes, tmp_path: Path
) -> None:
    run = processes.python(
        "-m", "benchmarks", "--quick", "--only", "push,apply", "--out", str(tmp_path)
    )
    assert run.wait(90) == 0, run.output
    (path,) = tmp_path.glob("*-quick.json")
    written = json.loads(path.read_text(encoding="utf-8"))
    names = [each["name"] for each in written["figures"]]
    assert {"push 1 MiB", "tutorial push 1 MiB", "push 1 MiB / tutorial", "apply adam 1 MiB"} <= {
        *names
    }
    for each in written["figures"]:
        assert each["min"] <= each["median"] <= each["max"] and each["values"], each
        assert any(line.startswith(each["name"]) for line in run.stdout), each["name"]
    assert {row["figure"] for row in written["goals"]} >= {"push 1 MiB", "push 1 MiB / tutorial"}
    assert written["quick"] and not written["failures"]
    plotted = any(line.endswith(".png") for line in run.stdout)
    assert plotted or any("pip install -e '.[bench]'" in line for line in run.stdout)


def test_a_section_that_fails_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import __main__ as command
    from benchmarks.processes import BenchmarkError

    def fail(_: object) -> None:
        raise BenchmarkError("no reason")

    reached: list[str] = []
    monkeypatch.setitem(SECTIONS, "push", fail)
    monkeypatch.setitem(SECTIONS, "pull", lambda _: reached.append("pull"))
    monkeypatch.setattr(command, "QUICK", replace(QUICK, large=4096, budget=4096))
    assert command.main(["--quick", "--only", "push,pull", "--out", str(tmp_path)]) == 1
    assert "push failed: no reason" in capsys.readouterr().out
    assert reached == ["pull"]


# -- the self-test of a link -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("round_trip", "pull", "push", "words"),
    [
        (0.0005, 1e9, 2e9, ["near", "fast", "100 MiB"]),
        (0.005, 1e9, 2e8, ["some way off", "good"]),
        (0.1, 5e7, 1e9, ["far off", "slow"]),
        (0.1, 1e6, 1e6, ["very slow"]),
    ],
)
def test_a_verdict_goes_by_the_slower_direction(
    round_trip: float, pull: float, push: float, words: list[str]
) -> None:
    text = "\n".join(bench.verdict(round_trip, pull, push))
    assert all(word in text for word in words), text


def test_a_verdict_says_nothing_of_what_is_not_known() -> None:
    assert len(bench.verdict(0.001, None)) == 1
    assert len(bench.verdict(0.001, 1e9)) == 2


def test_variables_to_read_are_chosen_by_size() -> None:
    sizes = {"a": 1, "b": 2 * MIB, "c": 3 * MIB, "d": 40 * MIB}
    held = [Variable(name, "float32", (n // 4 or 1,)) for name, n in sizes.items()]
    assert [v.name for v in bench.choose(held, 4 * MIB)] == ["a", "b", "c"]
    assert [v.name for v in bench.choose(held, 100 * MIB)] == ["a", "b", "c", "d"]
    assert [v.name for v in bench.choose(held, 6 * MIB)] == ["a", "b", "c"]
    assert [v.name for v in bench.choose(held[3:], MIB)] == ["d"]
    assert bench.choose([], MIB) == []


def test_empty_servers_are_tested_in_full_and_ended(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "BUDGET_S", 0.05)
    (first, one), (second, other) = processes.ps(), processes.ps()
    assert bench.main(["--ps", f"{one},{other}", "--mib", "1", "--keep"]) == 0
    assert first.running and second.running
    assert bench.main(["--ps", f"{one},{other}", "--mib", "1"]) == 0
    out = capsys.readouterr().out
    for words in ("pull 1 KiB", "push 1 KiB", "push 1 MiB", "pull 1 MiB", "MB/s", "distance:"):
        assert out.count(words) >= 2, out
    assert (first.wait(), second.wait()) == (0, 0)


def test_a_job_is_only_read(
    cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "BUDGET_S", 0.05)
    two = cluster(2)
    two.initialize({"w": np.zeros(MIB // 4, np.float32), "b": np.zeros(3, np.float32)})
    with two.client("worker:0") as worker:
        worker.push({"b": np.ones(3, np.float32)})
        before = two.status()
        assert bench.main(["--ps", ",".join(two.addresses)]) == 0
        after = two.status()
        out = capsys.readouterr().out
        assert "a job, at step 1" in out and "pull 12 bytes" in out and "bandwidth:" in out
        assert "push" not in out
        assert after.global_step == before.global_step == 1
        assert [w.worker for w in after.workers] == ["worker:0"] and not after.chief
        np.testing.assert_array_equal(worker.pull()["b"], np.full(3, -0.5, np.float32))


def test_the_command_says_why_it_cannot(
    processes: Processes, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["--ps", "127.0.0.1:1", "--mib", "0"]) == 2
    assert "--mib must be positive" in capsys.readouterr().err
    flags = ["--ps", "127.0.0.1:1", "--connect-timeout", "0.2"]
    run = processes.python("-m", "paramserver", "bench", *flags)
    assert run.wait() == 1, run.output
    assert "bench: cannot reach ps at 127.0.0.1:1" in run.stderr[-1]
