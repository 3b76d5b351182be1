"""What an experiment sees of the run that it is part of: data that are noted for the record, pieces
that are kept.

Pieces of one run go on where it was interrupted (`Run.pieces`); those that several exhibits share
are done once (`Run.keep`).
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from dpcompanion import data
from dpcompanion.reproduction import pieces, records

#: Seconds from which on `Run.keep` keeps pieces on the disk.
KEPT = 15
_TRAINED: dict[tuple[str, str], Any] = {}


@dataclasses.dataclass(eq=False)
class Run:
    """What an experiment sees of the run that it is part of.

    `device` is where to compute; `folder` keeps the pieces of an unfinished run; `loaded` lists the
    data that were used, for the record; `version` is that of the experiment.
    """

    config: Any
    device: torch.device
    folder: pathlib.Path
    version: int = 1
    loaded: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def load(self, name: str, **arguments: Any) -> data.Dataset:
        """`data.load`, noted in the record."""
        dataset = data.load(name, **arguments)
        if dataset.provenance() not in self.loaded:
            self.loaded.append(dataset.provenance())
        return dataset

    def note(self, loaded: Iterable[dict[str, Any]]) -> None:
        """Note data that were loaded before (`Dataset.provenance()` of each) in the record."""
        self.loaded += [each for each in loaded if each not in self.loaded]

    def pieces(
        self, work: Callable[[str], Any], names: Iterable[str], **arguments: Any
    ) -> dict[str, Any]:
        """`pieces.resumable` for this run: {name: work(name)}, kept until the record is written.

        Where every name tells its piece's seed ("seed-3"), a run with other seeds shares what is
        done already. Pieces that the checkout carries in `results/begun`, as those of
        "table-11.paper.parts" of a paper, are taken over.
        """
        names, config = list(names), dataclasses.asdict(self.config)
        if all("seed" in str(name) for name in names):
            config.pop("seeds", None)
        key = {"config": config, "version": self.version, "device": self.device.type}
        carried = (
            records.results_folder()
            / "begun"
            / self.folder.parent.name
            / self.folder.name.removeprefix(".")
        )
        pieces.bring(carried, self.folder)
        return pieces.resumable(work, names, folder=self.folder, config=key, **arguments)

    def keep(
        self,
        work: Callable[[str], Any],
        names: Iterable[str],
        *,
        config: Any,
        seconds: float,
        under: str,
        version: int = 1,
        label: str = "",
    ) -> dict[str, Any]:
        """{name: work(name)} for pieces that several exhibits share: each is trained once and kept.

        What takes long is kept in the data folder, each piece as it ends, and an interrupted run
        goes on there; what does not, once a process. Pieces that the checkout carries in
        `results/begun`, under the same folder, are taken over.

        Args:
            work: piece name -> values that a record can hold, or a pair (values, {name: array}).
            names: of the pieces, such as "seed-3".
            config: what the results depend on besides.
            seconds: about how long all pieces take on two cores.
            under: what the work is: a folder in the data folder, such as "runs/mnist-mlp".
            version: of the work: raised when a change of code moves its results, so that kept
                pieces count no more.
            label: of the progress bar.
        """
        key = {"config": config, "version": version, "device": self.device.type}
        hashed, names = records.hash_of([under, key]), list(names)
        if seconds >= KEPT:
            kept = f"{under}-{hashed[:12]}"
            folder = data.data_folder() / kept
            pieces.bring(records.results_folder() / "begun" / kept, folder)
            return pieces.resumable(work, names, folder=folder, config=key, label=label)
        for name in names:
            if (hashed, name) not in _TRAINED:
                _TRAINED[hashed, name] = work(name)
        return {name: _TRAINED[hashed, name] for name in names}


def forget() -> None:
    """Forget the pieces that `Run.keep` has in memory, so that they are trained again."""
    _TRAINED.clear()
