"""One training on several processes, with an epsilon for each picture.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 \\
        several_processes.py

Beside a program for one process, the lines marked with # <- are new.  As it
stands it trains a small network with a frozen BatchNorm on made-up
pictures, in seconds and without a download: put your own model and data in
their place.  If a process is lost, torchrun starts all of them again, and
the run goes on from its checkpoint.
"""

import os
import sys

import torch
import torch.distributed as dist  # <-

from dpcompanion.training import (
    Checkpoint,
    DPSGDPlan,
    Track,
    cross_entropy,
    train,
)

FOLDER = sys.argv[1] if len(sys.argv) > 1 else "several"
os.makedirs(FOLDER, exist_ok=True)

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")  # <-
device = f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu"  # <-
# The same first weights, and here the same data, on every rank:
torch.manual_seed(0)  # <-

pictures, labels = torch.randn(400, 3, 8, 8), torch.randint(2, (400,))
pictures[labels == 1] += 0.5

model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3),
    torch.nn.BatchNorm2d(8),
    torch.nn.ReLU(),
    torch.nn.Flatten(),
    torch.nn.Linear(288, 2),
)
# Statistics from elsewhere: this one's are those that it begins with.
model[1].eval()
model.to(device)

plan = DPSGDPlan.for_epsilon(
    4.0, n=400, batch_size=40, epochs=8, max_grad_norm=1.0, delta=1e-4
)
history = train(
    model,
    cross_entropy,
    (pictures, labels),
    plan,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
    track=Track(clipping="individual"),
    device=device,
    checkpoint=Checkpoint(f"{FOLDER}/run.pt"),
)

if dist.get_rank() == 0:  # <- all ranks hold the same model and history
    torch.save(model.state_dict(), f"{FOLDER}/model.pt")
    epsilons = history.epsilons()
    low, high = epsilons.min(), epsilons.max()
    print(f"epsilon of a picture: {low:.2f} to {high:.2f}")
    print(history.statement())
dist.destroy_process_group()  # <-
