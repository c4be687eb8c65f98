"""A notebook whose cell trains with two ranks, run cell by cell as Jupyter does."""

import nbclient
import nbformat

IMPORTS = """
import torch
from accelerate import Accelerator, notebook_launcher
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
"""
MODEL = """
def build():
    return nn.Sequential(nn.Linear(128, 768), nn.GELU(), nn.Linear(768, 768), nn.GELU(),
                         nn.Linear(768, 1))

def data():
    x = torch.randn(4096, 128, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :4].sum(1, keepdim=True) + torch.randn(4096, 1))
"""
TRAINING = """
def training_loop(epochs, batch_size=128):
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data(), batch_size=batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            if step % 20 == 0:
                accelerator.print(f"step {step}: loss {loss.item():.5f}", flush=True)
"""
LAUNCH = """
import socket
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = str(free.getsockname()[1])
notebook_launcher(training_loop, (10**9,), num_processes=2, use_port=port)
"""


class Client(nbclient.NotebookClient):
    """Shows what a cell prints while it runs; nbclient itself keeps it in the notebook."""

    def process_message(self, msg, cell, cell_index):
        if msg["msg_type"] == "stream":
            print(msg["content"]["text"], end="", flush=True)
        return super().process_message(msg, cell, cell_index)


def main():
    cells = [nbformat.v4.new_code_cell(code.strip()) for code in (IMPORTS, MODEL, TRAINING, LAUNCH)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    Client(notebook, kernel_name="python3", timeout=None).execute()


if __name__ == "__main__":
    main()
