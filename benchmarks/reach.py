"""What a run must reach, what it aims at, and whether it did. Only numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.figures import Figure, number
from benchmarks.scale import Scale, label

#: Distributed TensorFlow on two such cores. Over the raw socket: its pull, and its push with apply.
TF_PULL = 0.55
TF_PUSH_SGD = 0.56
TF_PUSH_ADAM = 0.44
#: Its steps a second: of the linear regression, beside a raw turn of so many ms, and of the digits.
TF_STEPS = 373.0
TF_RAW_TURN_MS = 0.080
TF_DIGITS = 383.0


@dataclass(frozen=True)
class Goal:
    """A floor (or ceiling) and an aim for one figure: its ratio to the yardstick, or its median."""

    text: str
    figure: str
    of: str
    most: bool
    floor: float | None
    aim: float | None = None

    def value(self, figures: Sequence[Figure]) -> float | None:
        """What was reached; None if it was not measured."""
        for figure in figures:
            if figure.name == self.figure:
                return figure.ratio if self.of == "ratio" else figure.median
        return None

    def met(self, value: float, bound: float) -> bool:
        """Whether `value` is on the right side of `bound`."""
        return value <= bound if self.most else value >= bound


def goals(scale: Scale, figures: Sequence[Figure] = ()) -> list[Goal]:
    """All of them, in the order of the table; with TensorFlow's own figure where it was
    measured."""
    large, largest = label(scale.large), label(scale.largest)
    many = scale.many[0]
    tf_pull = next((f.ratio for f in figures if f.name == f"TensorFlow pull {large}"), None)
    tf_push = next((f.ratio for f in figures if f.name == f"TensorFlow push {large}"), None)

    def least(
        text: str, figure: str, floor: float | None, aim: float | None = None, of: str = "median"
    ) -> Goal:
        return Goal(text, figure, of, False, floor, aim)

    def most(
        text: str, figure: str, floor: float | None, aim: float | None = None, of: str = "median"
    ) -> Goal:
        return Goal(text, figure, of, True, floor, aim)

    return [
        least("push + SGD over the raw socket", f"push {large}", 0.50, 0.70, "ratio"),
        least("push + SGD over the tutorial's", f"push {large} / tutorial", 6.0),
        least("pull over the raw socket", f"pull {large}", 0.58, 0.80, "ratio"),
        least("pull over the tutorial's", f"pull {large} / tutorial", 6.0),
        least("pull: TensorFlow's", f"pull {large}", tf_pull or TF_PULL, None, "ratio"),
        least("push + SGD: TensorFlow's", f"push {large}", None, tf_push or TF_PUSH_SGD, "ratio"),
        least("push + Adam: TensorFlow's", f"push + adam {large}", None, TF_PUSH_ADAM, "ratio"),
        most("push + Adam over push + SGD, time", "push + adam / push + sgd", 1.5),
        *(
            least(f"{what}, {text}", name, 0.85)
            for what in ("push", "pull")
            for text, name in (
                (f"{largest} over {large}", f"{what} {largest} / {large}"),
                (f"{many} variables over 1", f"{what} {many} variables / 1"),
            )
        ),
        most("tiny step over the tutorial's pair, time", "tiny push_pull / tutorial pair", 1 / 2.5),
        most("tiny step over a gRPC stream turn", "tiny push_pull / bare stream turn", None, 1.5),
        most(
            "training step, ms (TensorFlow's / 5)",
            "training step, linear model",
            1e3 / TF_STEPS / 5,
        ),
        most(
            "training step, raw turns (TensorFlow's / 5)",
            "training step, linear model",
            1e3 / TF_STEPS / 5 / TF_RAW_TURN_MS,
            None,
            "ratio",
        ),
        least(
            "digits MLP, steps/s (3 x TensorFlow's)", "digits MLP, 2 workers async", 3 * TF_DIGITS
        ),
        least("digits MLP, accuracy", "digits MLP, test accuracy", 0.96),
        least("two workers over one, push", "push: 2 workers / 1", 1.0),
        least("two workers over one, small steps", "step: 2 workers / 1", 1.0),
        most("peak memory over the variables", f"peak memory / variables, {largest}", 3.5),
        most("launch to first step, ms", "launch to first step", 1000.0),
    ]


def table(scale: Scale, figures: Sequence[Figure]) -> list[dict[str, object]]:
    """One row a goal that was measured: its floor and aim, what was reached, and the verdicts."""
    rows: list[dict[str, object]] = []
    for goal in goals(scale, figures):
        value = goal.value(figures)
        if value is None:
            continue
        row: dict[str, object] = {"goal": goal.text, "figure": goal.figure, "reached": value}
        for key, bound in (("floor", goal.floor), ("aim", goal.aim)):
            if bound is not None:
                row[key] = bound
                row[f"{key} met"] = goal.met(value, bound)
                row[f"{key} text"] = f"{'<=' if goal.most else '>='} {number(bound)}"
        rows.append(row)
    return rows


def unmeasured(scale: Scale, figures: Sequence[Figure]) -> list[str]:
    """The figures that goals speak of and that are not there."""
    names = {figure.name for figure in figures}
    wanted = dict.fromkeys(goal.figure for goal in goals(scale, figures))
    return [name for name in wanted if name not in names]
