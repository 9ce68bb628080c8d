import asyncio
import gc
import subprocess
import sys
import threading

import pytest

from rollwright.envs import registry
from rollwright.envs.base import EnvironmentFailure, Forkable, PromptTemplates, Reset, Step
from rollwright.envs.threaded import BlockingRunner, wrap


class Blocking:
    """A synchronous environment that records its threads and hangs on request."""

    instruction = "Wait."
    prompts = PromptTemplates("", "{observation}", "{observation}")

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.free = threading.Event()

    def reset(self, seed: int) -> Reset:
        self.threads.append(threading.get_ident())
        return Reset(str(seed), {})

    def step(self, answer: str) -> Step:
        self.threads.append(threading.get_ident())
        if answer == "hang":
            self.free.wait()
        if answer == "raise":
            raise ZeroDivisionError("on purpose")
        return Step(answer, 0.0, False, False, {})

    def close(self) -> None:
        self.threads.append(threading.get_ident())


class Copyable(Blocking):
    def fork(self) -> "Copyable":
        return Copyable()


async def test_every_call_runs_in_one_and_the_same_other_thread() -> None:
    inner = Blocking()
    env = wrap(inner)
    assert await env.reset(5) == Reset("5", {})
    assert (await env.step("hello")).observation == "hello"
    await env.close()
    assert len(inner.threads) == 3
    assert len(set(inner.threads)) == 1
    assert inner.threads[0] != threading.get_ident()


async def test_an_error_is_raised_where_the_call_was_made_and_the_environment_lives_on() -> None:
    env = wrap(Blocking())
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        await env.step("raise")
    assert (await env.step("fine")).observation == "fine"
    await env.close()


async def test_a_hung_environment_delays_nobody_else() -> None:
    hung, fine = Blocking(), wrap(Blocking())
    waiting = asyncio.create_task(wrap(hung).step("hang"))
    assert (await fine.step("fine")).observation == "fine"
    assert not waiting.done()
    hung.free.set()
    assert (await waiting).observation == "hang"
    await fine.close()


async def test_a_call_that_was_given_up_leaves_an_environment_that_refuses_and_closes_at_once() -> None:
    inner = Blocking()
    env = wrap(inner)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(env.step("hang"), 0.05)
    with pytest.raises(EnvironmentFailure, match="was cancelled"):
        await env.reset(0)
    await env.close()
    inner.free.set()


def test_a_hung_environment_holds_up_neither_the_loop_nor_the_end_of_the_process() -> None:
    script = (
        "import asyncio, threading\n"
        "from rollwright.envs.threaded import BlockingRunner\n"
        "async def main():\n"
        "    try: await asyncio.wait_for(BlockingRunner('hung').run(threading.Event().wait), 0.05)\n"
        "    except TimeoutError: print('given up')\n"
        "asyncio.run(main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "given up\n", "")


async def test_a_result_that_comes_after_its_loop_has_closed_is_dropped_quietly(recwarn) -> None:
    free, ended = threading.Event(), threading.Event()

    def call() -> None:
        free.wait()
        ended.set()

    def give_up() -> None:
        async def main() -> None:
            await asyncio.wait_for(BlockingRunner("late").run(call), 0.02)

        with pytest.raises(TimeoutError):
            asyncio.run(main())

    await asyncio.to_thread(give_up)
    free.set()
    assert await asyncio.to_thread(ended.wait, 10)
    gc.collect()
    assert not recwarn.list


async def test_the_thread_ends_with_its_environment() -> None:
    before = set(threading.enumerate())
    closed, dropped = wrap(Blocking()), wrap(Blocking())
    await closed.reset(0)
    await dropped.reset(0)
    started = set(threading.enumerate()) - before
    assert len(started) == 2
    await closed.close()
    del dropped
    gc.collect()
    for thread in started:
        thread.join(timeout=10)
        assert not thread.is_alive()


async def test_only_what_can_be_copied_can_be_forked() -> None:
    assert not isinstance(wrap(Blocking()), Forkable)
    env = wrap(Copyable())
    assert isinstance(env, Forkable)
    fork = env.fork()
    assert (await fork.reset(1)).observation == "1"
    await fork.close()
    assert (await env.reset(2)).observation == "2"
    await env.close()


async def test_the_registry_wraps_a_synchronous_environment_by_itself(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "blocking_envs", sys.modules[__name__])
    env = registry.make("blocking_envs:Blocking")
    assert (await env.reset(9)).observation == "9"
    assert env.answer("Up") == "<answer>Up</answer>"
    assert env.actions() == ()
    await env.close()


async def test_a_closed_environment_refuses_and_can_be_closed_again() -> None:
    env = wrap(Blocking())
    await env.reset(0)
    await env.close()
    with pytest.raises(EnvironmentFailure, match="it is closed"):
        await env.step("hello")
    await env.close()
