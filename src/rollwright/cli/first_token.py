"""Measures its own start: `python -m rollwright.cli.first_token BEGAN MODEL` prints the seconds of each part in order.

`BEGAN` is the monotonic clock at the process's creation, so that the start of the interpreter counts.
"""

import sys
import time
from itertools import pairwise


def main() -> None:
    at = [float(sys.argv[1]), time.monotonic()]
    import rollwright.cli.run_execution  # noqa: F401 — the imports of `rollwright run`

    at.append(time.monotonic())
    from rollwright.hardware import claim_threads

    claim_threads()
    import torch  # noqa: F401

    at.append(time.monotonic())
    import asyncio

    from rollwright.engines.base import Prompt, Sampling
    from rollwright.engines.rendering import make_renderer
    from rollwright.engines.torch import TorchPolicy
    from rollwright.models.loading import load_model, load_tokenizer
    from rollwright.trajectory import token_ids

    at.append(time.monotonic())
    tokenizer = load_tokenizer(sys.argv[2])
    renderer = make_renderer(tokenizer, "template")  # type: ignore[arg-type]
    at.append(time.monotonic())
    policy = TorchPolicy(load_model(sys.argv[2]), renderer)
    at.append(time.monotonic())

    async def generate() -> None:
        ids = token_ids(tokenizer.encode("Which way do you go?"))
        await policy.generate(Prompt("startup", ("startup",), (), ids=ids), Sampling(max_tokens=1))
        at.append(time.monotonic())
        await policy.close()

    asyncio.run(generate())
    print(*(round(after - before, 4) for before, after in pairwise(at)))


if __name__ == "__main__":
    main()
