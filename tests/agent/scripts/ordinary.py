"""An ordinary training that makes mistakes and survives them: what does the script itself see?

Writes losses, the hash of the parameters, and type and text of each exception that it caught.
"""

# ruff: noqa: BLE001, T201

import datetime
import hashlib
import json
import logging
import os
import signal
import sys
import threading
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

seen = []


class Numbers(Dataset):
    def __init__(self, bad=-1):
        self.bad = bad

    def __len__(self):
        return 16

    def __getitem__(self, index):
        if index == self.bad:
            raise IndexError(f"no item {index}")
        return torch.full((8,), float(index) / 16)


class Unspeakable:
    def __str__(self):
        raise LookupError("cannot be said")


def catch(what, function):
    try:
        function()
    except Exception as error:
        text = str(error).splitlines()[0] if str(error) else ""
        seen.append([what, type(error).__name__, text])
    else:
        seen.append([what, "nothing", ""])


def main(path, context):
    rank = int(os.environ["RANK"])
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    torch.manual_seed(7)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for epoch in range(2):
        workers = {"num_workers": 1, "multiprocessing_context": context}
        for batch in DataLoader(Numbers(), batch_size=4, **workers):
            loss = (model(batch + rank) ** 2).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()).hex())
            logging.getLogger("app").info("epoch %d loss %s", epoch, losses[-1])
            print("printed", epoch, len(losses))
    mistakes()
    total = torch.ones(3)
    dist.all_reduce(total)
    torch.save(model.state_dict(), f"{path}.{rank}.pt")
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    result = {
        "losses": losses, "seen": seen, "total": total.tolist(),
        "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
    }  # fmt: skip
    with open(f"{path}.{rank}.json", "w") as file:
        json.dump(result, file)
    dist.destroy_process_group()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, when the other rank raised first
    raise ValueError(f"the end of rank {rank}")


def mistakes():
    catch("loader", lambda: list(DataLoader(Numbers(bad=3), batch_size=4)))
    catch("group", lambda: dist.new_group([0, 99]))
    catch("gather", lambda: dist.all_gather_into_tensor(torch.ones(3), torch.ones(7)))
    catch("backward", lambda: torch.ones(2, requires_grad=True).backward())
    catch("closure", lambda: torch.optim.SGD([torch.ones(1)], 0.1).step(lambda: 1 / 0))
    catch("warning", strict_warning)
    catch("save", lambda: torch.save(threading.Lock(), os.devnull))
    catch("log", lambda: logging.getLogger("app").info("said %s", Unspeakable()))
    catch("write", lambda: sys.stdout.write(5))
    catch("work", lambda: dist.all_reduce(torch.ones(2, dtype=torch.complex32)))
    thread = threading.Thread(target=lambda: {}["thread"])
    thread.start()
    thread.join()


def strict_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.warn("careful", stacklevel=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
