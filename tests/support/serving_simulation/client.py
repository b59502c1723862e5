"""A client: sends its call, reads the answer, leaves or asks another replica."""

import asyncio

from tests.support.serving_simulation.answer_check import AnswerCheck, check_attempts
from tests.support.serving_simulation.calls import Answer, Call
from tests.support.serving_simulation.connection import STALL_S, Connection
from tests.support.serving_simulation.replica import Replica
from tests.support.serving_simulation.router import Router
from tests.support.serving_simulation.world import World


async def run_client(world: World, router: Router, call: Call) -> None:
    """Make the attempts of one client, and note the outcome that it writes down."""
    tried: set[int] = set()
    answer, attempts = Answer(), list[tuple[Replica, Answer]]()
    for attempt in range(router.MAX_ATTEMPTS):
        replica = router.pick(tried)
        if replica is None:
            break
        tried.add(replica.place)
        if attempt:
            world.note["retried on another replica"] += 1
        call.outcome, answer = await _attempt(world, call, replica)
        attempts.append((replica, answer))
        failed = answer.status in (0, 503) or answer.error is not None
        router.report(replica, ok=not failed)
        if call.outcome in ("left", "ok") or not router.may_retry(answer):
            break
    if call.outcome is None:
        call.outcome = "unavailable"
    world.log("outcome", call.request_id, call.outcome, answer.status, answer.code, answer.tokens)
    world.note[f"outcome: {call.outcome}"] += 1
    check_attempts(world, call, attempts)


async def _attempt(world: World, call: Call, replica: Replica) -> tuple[str, Answer]:
    connection = Connection(replica, call)
    if call.leaves == "building" or call.leaves == "early":
        scale = 0.01 if call.leaves == "building" and not world.scenario.slow_jobs else 1.0
        world.loop.call_later(0.004 + call.leaves_after_s * scale, connection.leave)
    elif call.leaves == "body":
        world.loop.call_later(0.0015, connection.leave)
    await connection.send_body()
    answer = Answer(tokens=[[] for _ in range(call.n)], texts=[""] * call.n, reasons=[None] * call.n)
    num_pieces = 0
    while True:
        what, value = await connection.read()
        if connection.left_s is not None or what == "closed":
            break
        if what == "start":
            answer.status = value
            continue
        if what == "end":
            answer.ended = True
            break
        num_pieces += 1
        if call.leaves == "token":
            connection.leave()
        if call.read_s and num_pieces > 1:
            # A client that reads nothing more sees the end of its connection all the same.
            await asyncio.sleep(min(call.read_s, 3 * STALL_S))
        connection.taken(len(value))
        answer.data += value
    if connection.left_s is not None:
        world.note[f"left {connection.state}"] += 1
        return "left", answer
    return AnswerCheck(world, connection, answer).outcome(), answer
