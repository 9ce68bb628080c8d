"""Writes small terminal tasks in Harbor's format: `python make_tasks.py FOLDER` makes FOLDER/train and FOLDER/test.

Each task asks for a word in a file, and its tests look into the file. No word of a test task is in a training task.
"""

import sys
from pathlib import Path

LISTED = """plum river stone cloud apple tiger lamp chair bread horse table grass paper glass snow music wheel clock spoon
garden bridge candle basket pencil window flower rabbit planet button mirror forest island lemon pepper butter carrot
monkey rocket ladder pillow castle violin silver copper cotton velvet marble desert harbor meadow valley summer winter
kitten turtle falcon parrot salmon walnut cherry orange banana ginger coffee sugar honey knife plate brush shirt scarf
glove boots coin stamp letter poem drum flute piano guitar anchor sail wagon saddle barrel bucket hammer nail rope chain
bell torch tent cave cliff beach"""
WORDS = LISTED.split()
HELD_OUT = 32
TASK = """schema_version = "1.4"
[task]
name = "words/{word}"
[environment]
docker_image = "host"
network_mode = "no-network"
workdir = "/srv"
memory_mb = 256
"""
TEST = """#!/bin/sh
if [ "$(cat /srv/answer 2>/dev/null)" = {word} ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def write_task(folder: Path, word: str) -> None:
    files = {
        "task.toml": TASK.format(word=word),
        "instruction.md": f"write {word} to answer\n",
        "tests/test.sh": TEST.format(word=word),
        "solution/solve.sh": f"echo {word} > /srv/answer\n",
    }
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (folder / "environment").mkdir(exist_ok=True)


def main(folder: Path) -> None:
    for place, word in enumerate(WORDS):
        write_task(folder / ("test" if place % 3 == 2 and place < 3 * HELD_OUT else "train") / word, word)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
