"""One of the processes of TRL's `GRPOTrainer` under accelerate, for `trainer_ranks.py`, which starts it by torchrun.

    python -m torch.distributed.run --standalone --nproc-per-node 2 bench/trainer_ranks_trl.py SIZE FOLDER

Writes the CPU seconds of its median step to `FOLDER/RANK.json`. accelerate finds torchrun's environment, takes gloo, and wraps
the model for data parallelism (DDP), which reduces gradients once in a step.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import json
import logging
import sys
import warnings
from pathlib import Path

import torch

from trainer import SIZES, _model, _rows, _scored, _trl


def main() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    name, folder = sys.argv[1:]
    size, rank, ranks = SIZES[name], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    seconds = _trl(size, _scored(_rows(size.vocabulary), _model(size)), rank, ranks)
    (Path(folder) / f"{rank}.json").write_text(json.dumps({"cpu_seconds": seconds}), encoding="utf-8")


if __name__ == "__main__":
    main()
