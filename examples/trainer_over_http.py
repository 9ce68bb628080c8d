"""A trainer in a process of its own: takes batches over HTTP, trains with plain torch, returns weights.

    rollwright serve-batches configs/frozen_lake_train.yaml
    python examples/trainer_over_http.py http://127.0.0.1:8710 weights

It imports nothing of rollwright. Killed at any moment and started again, it goes on with the batch that it had, from the
weights that were acknowledged last; Adam's moments begin anew then.
"""

import argparse
import json
import os
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def call(url: str, name: str, **fields: Any) -> dict[str, Any]:
    """One call of the service; a server that is being restarted is asked again."""
    token = f"Bearer {os.environ.get('BATCH_TOKEN', '')}"
    headers = {"Content-Type": "application/json", "Authorization": token}
    request = urllib.request.Request(f"{url}/v1/{name}", json.dumps(fields).encode(), headers)
    for wait in (0.2, 0.5, 1, 2, 5, 10, 20, 30, 0):
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{name}: {json.load(error)['message']}") from None
        except OSError:
            time.sleep(wait)
    raise SystemExit(f"{url} does not answer")


def keep_lease(url: str, batch: dict[str, Any], done: threading.Event) -> None:
    while not done.wait(batch["lease_seconds"] / 3):
        call(url, "renew_lease", lease=batch["lease"])


def loss_of(model: Any, row: dict[str, Any], tokens: float, temperature: float) -> torch.Tensor:
    """The clipped loss of PPO over the sampled tokens of one row."""
    ids, mask = torch.tensor(row["token_ids"]), torch.tensor(row["mask"]).bool()[1:]
    heat = torch.tensor([each or temperature for each in row["temperatures"] or [0.0] * len(ids)])[1:]
    logits = model(input_ids=ids[:-1].unsqueeze(0)).logits[0].float() / heat.clamp_min(1e-3).unsqueeze(1)
    new = torch.log_softmax(logits, -1).gather(1, ids[1:].unsqueeze(1)).squeeze(1)[mask]
    old, advantages, weights = (
        torch.tensor(row[key])[1:][mask] for key in ("logprobs", "advantages", "weights")
    )
    ratio = torch.exp(new - old)
    return -(weights * torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)).sum() / tokens


def train(url: str, place: Path, learning_rate: float, name: str) -> None:
    model, optimizer, version = None, None, -1
    while (reply := call(url, "get_batch", trainer=name))["state"] != "done":
        if reply["state"] == "wait":
            continue
        batch, done = reply["batch"], threading.Event()
        threading.Thread(target=keep_lease, args=(url, batch, done), daemon=True).start()
        if model is None or optimizer is None or batch["version"] != version:  # another trainer was faster
            model = AutoModelForCausalLM.from_pretrained(batch["folder"]).eval()
            optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
        rows = [row for row in batch["rows"] if any(row["advantages"])]
        tokens, total = sum(sum(row["weights"]) for row in batch["rows"]), 0.0
        for row in rows:
            loss = loss_of(model, row, tokens, batch["temperature"])
            loss.backward()
            total += float(loss.detach())
        told: dict[str, Any] = {"skipped": "no advantage"}
        if rows:
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
            folder = place / f"{batch['step'] % 2}"  # the run keeps what it needs of the one before
            model.save_pretrained(folder)
            told = {"folder": str(folder.absolute()), "metrics": {"loss": total, "grad_norm": norm}}
        done.set()
        version = call(url, "finish_batch", lease=batch["lease"], **told)["version"]
        print(f"batch {batch['step']}: version {version}, loss {total:.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("folder", type=Path, help="where the weights of each batch are saved")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--name", default="example", help="of this trainer; each has its own")
    given = parser.parse_args()
    torch.set_num_threads(1)
    train(given.url.rstrip("/"), given.folder, given.learning_rate, given.name)
