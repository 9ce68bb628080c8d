"""Output, exceptions and leftovers of code end at most their own execution, with a message."""

import asyncio
import platform
import sys
import textwrap
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollwright.sandbox.client import Sandbox, SandboxFactory

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason="confinement needs Linux on x86-64 or ARM64",
)


async def printed(sandbox: Sandbox, code: str) -> str:
    ran = await sandbox.run(textwrap.dedent(code))
    assert not ran.error, ran.error
    return ran.output


PRINTS = {
    "half of a surrogate pair": ("print('\\ud800')", "\\ud800\n"),
    "the value of a half": ("'\\udfff'", "'\\udfff'\n"),
    "the other order": ("print('\\udc00\\ud800')", "\\udc00\\ud800\n"),
    "zeros": ("print('a\\0b')", "a\0b\n"),
    "bytes that are no UTF-8, past Python": ("import os\nos.write(1, b'\\xff\\xfe')", "2\n"),
    "a huge line": ("print('x' * 10**7)", None),
    "many small writes": ("for _ in range(10**5): print(end='x')", None),
    "to the error output": ("import sys\nprint('\\ud800', file=sys.stderr)", "\\ud800\n"),
    "a kind of text of its own": (
        "class Text(str):\n    def __getitem__(self, at): return 5\n    def __len__(self): return -1\n"
        "import sys\nsys.stdout.write(Text('abc'))\nNone",
        "abc",
    ),
    "a closed output": ("import sys\nsys.stdout.close()\nprint('on')", None),
    "another output": ("import sys\nsys.stdout = None\nprint('lost')", ""),
    "an exit": ("print('bye')\nraise SystemExit('\\ud800')", "bye\n"),
    "a tracer left behind": ("import sys\nsys.settrace(lambda *a: 1 / 0)", None),
    "a profiler left behind": ("import sys\nsys.setprofile(lambda *a: 1 / 0)", None),
    "hardly any recursion left": ("import sys\nsys.setrecursionlimit(60)", ""),
    "an own alarm handler": ("import signal\nsignal.signal(signal.SIGALRM, print)\nNone", ""),
    "an ignored alarm": ("import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nNone", ""),
    "other hooks": ("import sys\nsys.excepthook = sys.displayhook = sys.unraisablehook = None", ""),
    "no cache of lines": ("import linecache\nlinecache.cache.clear()", ""),
    "a thread that prints later": (
        "import threading, time\ndef late():\n    time.sleep(0.05)\n    print('\\ud800')\nthreading.Thread(target=late).start()",
        None,
    ),
}


@pytest.mark.parametrize(("code", "shown"), PRINTS.values(), ids=list(PRINTS))
async def test_any_output_is_survived(plain_sandbox: Sandbox, code: str, shown: str | None) -> None:
    await printed(plain_sandbox, "kept = 1")
    ran = await plain_sandbox.run(code)
    assert not ran.has_ended
    if shown is not None:
        assert (ran.output, ran.error) == (shown, "")
    assert await printed(plain_sandbox, "kept") == "1\n"
    late = await plain_sandbox.run("while True: pass", seconds=0.1)
    assert (late.is_late, late.has_ended) == (True, False)


ERRORS = {
    "a half in the message": "raise ValueError('\\ud800')",
    "a repr that raises": "class A:\n    def __repr__(self): raise ValueError('no')\nA()",
    "a repr that is no text": "class A:\n    def __repr__(self): return 5\nA()",
    "a repr with a half": "class A:\n    def __repr__(self): return '\\ud800'\nraise ValueError(A())",
    "a repr that exits": "class A:\n    def __repr__(self): raise SystemExit\nraise ValueError(A())",
    "a message that cannot be made": "class E(Exception):\n    def __str__(self): raise ValueError('no')\nraise E",
    "a message that ends itself": "class E(BaseException):\n    def __str__(self): raise SystemExit\nraise E",
    "an error of the widest kind": "class E(BaseException): pass\nraise E('own')",
    "a group": "raise ExceptionGroup('g', [ValueError(1), ExceptionGroup('\\ud800', [TypeError('x')])])",
    "a group of the widest kind": "raise BaseExceptionGroup('g', [KeyboardInterrupt(), SystemExit()])",
    "an interruption": "raise KeyboardInterrupt",
    "endless recursion": "def f(): f()\nf()",
    "a chain of causes": "e = None\nfor at in range(500):\n    n = ValueError(at); n.__cause__ = e; e = n\nraise e",
    "an error that causes itself": "e = ValueError(1)\ne.__cause__ = e\nraise e",
    "notes that are none": "e = ValueError(1)\ne.__notes__ = [5, '\\ud800', object()]\nraise e",
    "notes that cannot be read": "e = ValueError(1)\ne.__notes__ = 5\nraise e",
    "a syntax error of its own": "raise SyntaxError('x', (1, 2, 3, 4))",
    "a syntax error with a half": "raise SyntaxError('\\ud800', ('\\ud800', 1, 2, '\\ud800'))",
    "an unreadable name": "E = type('\\ud800', (Exception,), {})\nraise E",
    "a class without a name": (
        "class M(type):\n    __name__ = __qualname__ = __module__ = property(lambda self: 1 / 0)\n"
        "class E(Exception, metaclass=M): pass\nraise E"
    ),
    "an error in place of its cause": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    e.args = ('\\ud800',)\n    raise",
    "bytes to the output": "import sys\nsys.stdout.write(b'abc')",
    "an output taken apart": "import sys\nsys.stdout._parts = [5]\nprint('x')",
    "an output without room": "import sys\nsys.stdout._room = 'much'\nprint('x')",
    "zeros in code": "1 +\0 1",
    "deep code": "(" * 500 + ")" * 500,
    "deep lists": "x = []\nfor _ in range(10**5): x = [x]\nx",
    "a time-out caught": "try:\n    while True: pass\nexcept BaseException:\n    raise ValueError('\\ud800')",
}


@pytest.mark.parametrize("code", ERRORS.values(), ids=list(ERRORS))
async def test_any_error_is_told_and_survived(plain_sandbox: Sandbox, code: str) -> None:
    await printed(plain_sandbox, "kept = 1")
    ran = await plain_sandbox.run(code, seconds=2.0)
    assert ran.error
    assert not ran.has_ended
    ran.error.encode()
    assert await printed(plain_sandbox, "kept") == "1\n"


ENDINGS = {
    "itself": "import os\nos._exit(3)",
    "its line": "import os\nos.close(3)",
    "all its files": "import os\nos.closerange(0, 100)",
    "its builtins": "import builtins\nbuiltins.__dict__.clear()",
    "the names that everything uses": "import builtins\nbuiltins.str = builtins.len = builtins.isinstance = None",
    "a message that never comes": (
        "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\n"
        "class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E"
    ),
    "text that is none, past Python": "import os\nos.write(3, b'\\x00\\x00\\x00\\x08\\x82\\xa4type\\xa2\\xff\\xfe')",
    "a reply of its own with bytes that are no text": (
        "import os, struct\nbody = b'\\x82\\xa4type\\xa3ran\\xa6output\\xa2\\xff\\xfe'\n"
        "os.write(3, struct.pack('>I', len(body)) + body)"
    ),
}


@pytest.mark.parametrize("code", ENDINGS.values(), ids=list(ENDINGS))
async def test_code_that_breaks_its_interpreter_ends_its_sandbox_with_a_message(
    plain_sandbox: Sandbox, code: str
) -> None:
    ran = await plain_sandbox.run(code, seconds=0.5)
    if not ran.has_ended:
        ran = await plain_sandbox.run("1", seconds=0.5)
    assert ran.has_ended
    assert ran.error


@pytest.fixture(scope="module")
def fuzzed(plain_sandboxes: SandboxFactory) -> Iterator[Sandbox]:
    """One sandbox for all examples, so that leftovers of each affect the next."""
    made = asyncio.run(plain_sandboxes.open())
    yield made
    made.close()


ANY_TEXT = st.text(st.characters(blacklist_categories=()), max_size=60)
PIECES = st.sampled_from(
    [
        "print({!r})",
        "{!r}",
        "raise ValueError({!r})",
        "raise KeyError({!r})",
        "class E(BaseException):\n    def __str__(self): return {!r}\nraise E",
        "import sys\nsys.stderr.write({!r})",
        "exec({!r})",
        "raise ExceptionGroup({!r}, [ValueError(1)])",
        "import os\nos.write(1, {!r}.encode('utf-8', 'surrogatepass'))",
        "{}",
    ]
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(pieces=st.lists(st.tuples(PIECES, ANY_TEXT), min_size=1, max_size=3))
def test_fuzzed_output_and_code_are_survived(fuzzed: Sandbox, pieces: list[tuple[str, str]]) -> None:
    async def run() -> None:
        for template, text in pieces:
            ran = await fuzzed.run(template.format(text), seconds=5.0)
            assert not ran.has_ended
            ran.output.encode()
            ran.error.encode()
        assert await printed(fuzzed, "6 * 7") == "42\n"

    asyncio.run(run())
