"""What the dead left on some shards only: a shard's list against what really happened at ps:0."""

from __future__ import annotations

import itertools

import pytest

from paramserver.cut_off import KEPT, CutOffStep, CutOffSteps

V, W, X = ("worker:0", 1), ("worker:1", 2), ("worker:2", 3)


def total(steps: CutOffSteps) -> int:
    return sum(step.delta for step in steps.steps)


@pytest.mark.parametrize(
    ("here", "decided", "listed"),
    [
        (5, 5, []),
        (0, 0, []),
        (5, 4, [CutOffStep(*V, 5, 1)]),
        (4, 5, [CutOffStep(*V, 5, -1)]),
        (0, 1, [CutOffStep(*V, 1, -1)]),
    ],
)
def test_without_rounds_a_step_more_or_less_is_a_version_more_or_less(
    here: int, decided: int, listed: list[CutOffStep]
) -> None:
    steps = CutOffSteps([])
    steps.departed(V, here, decided)
    assert steps.steps == listed


def test_a_restored_list_goes_on() -> None:
    steps = CutOffSteps([CutOffStep(*W, 3, 1)])
    steps.departed(V, 4, 5)
    assert [(s.worker, s.delta) for s in steps.steps] == [("worker:1", 1), ("worker:0", -1)]


# In rounds. Each worker pushes step 1 to both shards, to one of them, or to none, and dies; it dies
# before the round is closed here or after. Whoever is listed, the sum of the deltas must be the
# difference of the versions: one each if the round has a gradient at all.

HERE, THERE = "here", "there"
REACHED = [(), (HERE,), (THERE,), (HERE, THERE)]


@pytest.mark.parametrize("survivor", [False, True], ids=["all-die", "one-lives"])
@pytest.mark.parametrize("reached", list(itertools.product(REACHED, repeat=3)))
def test_a_round_that_some_died_in(reached: tuple[tuple[str, ...], ...], survivor: bool) -> None:
    for when in itertools.product(["before", "after"], repeat=3):
        fates = list(zip([V, W, X], reached, when, strict=True))
        # The round is closed here only when everybody alive has pushed.
        if any(moment == "after" and HERE not in to for _, to, moment in fates):
            continue
        for order in itertools.permutations(fates):
            check_round(order, survivor)


def check_round(
    fates: tuple[tuple[tuple[str, int], tuple[str, ...], str], ...], survivor: bool
) -> None:
    steps = CutOffSteps([])
    staged = {member for member, to, _ in fates if HERE in to}
    at_ps0 = {member for member, to, _ in fates if THERE in to}
    for moment in ("before", "after"):
        for member, to, died in fates:
            if died != moment:
                continue
            here, decided = int(HERE in to), int(THERE in to)
            if moment == "before" and here > decided:
                staged.discard(member)  # the shard drops it, and there is nothing to list
            else:
                steps.departed_from_round(member, here, decided)
        if moment == "before":
            closed = bool(staged) or survivor
            steps.closed_round([*staged, *([("worker:9", 9)] if survivor else [])])
    assert total(steps) == closed - (bool(at_ps0) or survivor), (fates, steps.steps)


def test_a_missed_step_is_listed_at_once_and_weighed_when_the_round_is_closed() -> None:
    steps = CutOffSteps([])
    steps.departed_from_round(V, here=2, decided=3)
    assert steps.steps == [CutOffStep(*V, 3, 0)]
    steps.closed_round([])
    assert steps.steps == [CutOffStep(*V, 3, -1)]
    steps.closed_round([])
    assert total(steps) == -1


def test_the_list_is_bounded_and_its_sum_stays() -> None:
    steps = CutOffSteps([])
    for life in range(KEPT + 50):
        steps.departed(("worker:0", life + 1), here=1, decided=life % 3 and 2)
    assert len(steps.steps) == KEPT
    assert steps.steps[0].worker == "(earlier)"
    assert steps.steps[-1].incarnation == KEPT + 50
    ones = sum(1 if life % 3 == 0 else -1 for life in range(KEPT + 50))
    assert total(steps) == ones


def test_what_was_cut_off_at_the_checkpoint_is_listed_after_the_restore() -> None:
    steps = CutOffSteps([CutOffStep(*W, 3, 1)])
    steps.settle(1)
    assert steps.steps == [CutOffStep(*W, 3, 1)]
    steps.settle(-1)
    assert steps.steps[1:] == [CutOffStep("(at the checkpoint)", 0, 0, -2)]
