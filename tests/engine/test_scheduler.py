"""Who computes when: priorities, turns between prompts and decoding, limits and deadlines."""

from __future__ import annotations

import pytest
from small_engine import SmallEngine, TinyModel

from pdjax.engine.plan import DecodeStep, PrefillStep, StepPlan
from pdjax.engine.request import Request
from pdjax.engine.scheduler import Scheduler
from pdjax.wire import Failed, SamplingParams, Tokens


def request(rid: str, prompt: int, priority: int = 0) -> Request:
    return Request(rid, [1] * prompt, SamplingParams(max_new_tokens=50), seed=0, priority=priority)


def plans(scheduler: Scheduler, count: int) -> list[StepPlan]:
    """Plan and note steps as the engine does; those who decode get token after token."""
    steps = []
    for _ in range(count):
        step = scheduler.next_step()
        assert step is not None
        steps.append(step)
        if isinstance(step, PrefillStep):
            done = scheduler.prefilled(step)
            if done is not None:
                done.output_ids.append(1)
                scheduler.add_running(done)
        else:
            for row in step.rows:
                scheduler.running[row.rid].output_ids.append(1)
    return steps


def kinds(steps: list[StepPlan]) -> str:
    return "".join("d" if isinstance(step, DecodeStep) else "p" for step in steps)


def test_a_long_prompt_and_decoding_take_turns() -> None:
    scheduler = Scheduler(prefill_tokens=8, eos_token_ids=())
    scheduler.add_prefill(request("short", 3))
    scheduler.add_prefill(request("long", 40))
    assert kinds(plans(scheduler, 11)) == "pdpdpdpdpdp"


def test_short_prompts_share_a_turn_up_to_the_token_budget() -> None:
    scheduler = Scheduler(prefill_tokens=8, eos_token_ids=())
    for number in range(9):
        scheduler.add_prefill(request(str(number), 2))
    assert kinds(plans(scheduler, 13)) == "ppppdppppdpdd"


def test_prompts_go_in_order_but_for_priority() -> None:
    scheduler = Scheduler(prefill_tokens=8, eos_token_ids=())
    for rid, priority in (("a", 0), ("b", 1), ("c", 0), ("d", 1), ("e", -1)):
        scheduler.add_prefill(request(rid, 8, priority))
    order = [step.row.rid for step in plans(scheduler, 9) if isinstance(step, PrefillStep)]
    assert order == ["b", "d", "a", "c", "e"]


def test_a_higher_priority_overtakes_between_two_chunks_and_the_rest_goes_on(tiny: TinyModel) -> None:
    small = SmallEngine(tiny)
    small.send("long", [5] * 100, 3)
    small.turn()
    small.send("urgent", [6] * 10, 3, priority=9)
    small.run()
    assert list(small.ends()) == ["urgent", "long"]
    alone = SmallEngine(tiny)
    alone.send("long", [5] * 100, 3)
    alone.run()
    assert small.ids("long") == alone.ids("long")


def test_of_those_that_wait_the_highest_priority_starts_first(tiny: TinyModel) -> None:
    small = SmallEngine(tiny)
    for number in range(20):
        small.send(str(number), [number + 1] * 8, 6, priority=number)
    small.run()
    # Requests are taken in together, before the first is admitted.
    started = sorted(small.ends(), key=lambda rid: next(i for i, m in enumerate(small.emitted) if m.rid == rid))  # type: ignore
    assert started == [str(number) for number in reversed(range(20))]


def test_no_more_requests_run_together_than_are_allowed(tiny: TinyModel) -> None:
    small = SmallEngine(tiny)
    for number in range(20):
        small.send(str(number), [number] * 4, 10)
    most = 0
    while small.turn() or small.engine.requests:
        most = max(most, len(small.engine.scheduler.running))
    assert most == tiny.rows and len(small.ends()) == 20


def test_one_request_over_the_queue_is_refused_with_429_and_a_sentence(tiny: TinyModel) -> None:
    small = SmallEngine(tiny, queued=2)
    for number in range(tiny.rows + 3):
        small.send(str(number), [1, 2, 3], 4)
    small.run()
    refused = [end for end in small.ends().values() if isinstance(end, Failed)]
    assert [end.status for end in refused] == [429] and "try again" in refused[0].message
    assert refused[0].rid == str(tiny.rows + 2)


def test_a_full_queue_does_not_turn_away_what_another_instance_has_begun(tiny: TinyModel) -> None:
    small = SmallEngine(tiny, queued=2)
    for number in range(tiny.rows + 2):
        small.send(str(number), [1, 2, 3], 4)
    for number in range(3):
        small.send(f"begun {number}", [1, 2, 3], 4, output_ids=[7])
    small.run()
    refused = [end for end in small.ends().values() if isinstance(end, Failed)]
    assert [(end.rid, end.status) for end in refused] == [("begun 2", 429)], "so many may wait again, and no more"


def test_a_request_past_its_deadline_fails_with_504_wherever_it_is(tiny: TinyModel) -> None:
    now = [100.0]
    small = SmallEngine(tiny, clock=lambda: now[0])
    for number in range(tiny.rows):
        small.send(f"running {number}", [number] * 4, 100, deadline_s=50.0 if number else None)
    for _ in range(40):
        small.turn()
    small.send("waiting", [1] * 4, 4, deadline_s=20.0)
    small.send("patient", [1] * 4, 4, deadline_s=1000.0)
    small.turn()
    now[0] = 125.0
    small.turn()
    ends = small.ends()
    assert list(ends) == ["waiting"] and isinstance(ends["waiting"], Failed) and ends["waiting"].status == 504
    assert "20 s" in ends["waiting"].message and "it waited for free pages" in ends["waiting"].message
    now[0] = 151.0
    small.turn()
    assert sum(isinstance(end, Failed) for end in small.ends().values()) == tiny.rows
    small.run()
    assert isinstance(small.ends()["patient"], Tokens) and isinstance(small.ends()["running 0"], Tokens)


@pytest.mark.parametrize("deadline", [0.0, -1.0, float("nan")])
def test_a_deadline_in_the_past_is_a_bad_request(tiny: TinyModel, deadline: float) -> None:
    small = SmallEngine(tiny)
    small.send("a", [1], 1, deadline_s=deadline)
    small.run()
    end = small.ends()["a"]
    assert isinstance(end, Failed) and end.status == 400 and "deadline" in end.message


def test_an_idle_engine_wakes_for_a_deadline(tiny: TinyModel) -> None:
    """The loop itself, on its own clock: nothing else comes in, and the request cannot be admitted."""
    import threading
    import time

    from pdjax.engine.engine import Stop

    small = SmallEngine(tiny)
    small.role.poll = lambda now: None  # type: ignore[method-assign]
    thread = threading.Thread(target=small.engine.run)
    thread.start()
    small.send("a", [1, 2], 4, deadline_s=0.2)
    started = time.monotonic()
    while not small.emitted and time.monotonic() - started < 20:
        time.sleep(0.01)
    elapsed = time.monotonic() - started
    small.inbox.put(Stop())
    thread.join(20)
    assert isinstance(small.emitted[0], Failed) and small.emitted[0].status == 504
    assert elapsed < 4  # and not at the next look at the clock, 5 s later
