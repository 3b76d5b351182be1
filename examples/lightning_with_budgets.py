"""A network trained by Lightning with a privacy budget for each person.

The engine makes network, optimizer and loader private; Lightning runs the
loop.  Manual optimisation leaves the step to the private optimizer, which
clips, adds noise and accounts.  As it stands it trains on made-up numbers,
in seconds.

Lightning's own gradient clipping and accumulation are off in this mode.
Leave out what would change a gradient between backward pass and step,
float16, and the training loss in logs that are published: it has no noise.
"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from dpcompanion.engine import IndividualizedPrivacyEngine

import lightning.pytorch as lightning  # isort: skip

# A number repeats a run, for research: whoever knows it can subtract the
# noise.
SEED = None
EPOCHS = 3


class Private(lightning.LightningModule):
    """A network and an optimizer that the engine has made."""

    def __init__(self, network, optimizer):
        super().__init__()
        self.network, self.private_optimizer = network, optimizer
        self.automatic_optimization = False

    def configure_optimizers(self):
        return self.private_optimizer

    def training_step(self, batch, index):
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.network(x), y))
        optimizer.step()


generator = torch.Generator().manual_seed(0)
x = torch.randn(200, 10, generator=generator)
y = (x[:, 0] > 0).long()
budgets = torch.where(torch.arange(200) % 2 == 0, 1.0, 4.0)  # one a person

torch.manual_seed(0)
network = torch.nn.Sequential(
    torch.nn.Linear(10, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)
)
engine = IndividualizedPrivacyEngine(accountant="rdp")
network, optimizer, loader = engine.make_private_with_budgets(
    module=network,
    optimizer=torch.optim.SGD(network.parameters(), lr=0.5),
    data_loader=DataLoader(TensorDataset(x, y), batch_size=20),
    target_epsilons=budgets,
    target_delta=1e-4,
    epochs=EPOCHS,
    max_grad_norm=1.0,
    seed=SEED,
)
trainer = lightning.Trainer(
    max_epochs=EPOCHS,
    accelerator="cpu",
    devices=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Private(network, optimizer), train_dataloaders=loader)

epsilons = engine.get_epsilons(1e-4)
print(f"steps: {trainer.global_step}")
print(f"epsilon {epsilons[0]:.3f} of a budget of 1, {epsilons[1]:.3f} of 4")
