"""A step of a transformer of BERT's size (109 million parameters) by the length of its texts.

Float32, one thread, random texts: 4 of 32 or 128 tokens, or 2 of 512. The gradient of a batch, ours
and that of Opacus's ghost mode clipped, in turns; medians of processor time. `ratio` is the time
over that of a plain gradient in the same turns; `peak MiB` is what the memory of a process of its
own grows by at most in a step.
"""

from benchmarks import networks
from benchmarks._turns import timings


def run():
    """The rows of the table."""
    rows = []
    for name in (name for name in networks.NETWORKS if name.startswith("bert")):
        ways = ("plain", "dpcompanion", "Opacus ghost")
        times = timings({way: networks.maker(name, "step", way) for way in ways}, 1, 2)
        examples = networks.NETWORKS[name][1]
        rows += [
            {
                "network": name,
                "way": way,
                "ms an example": 1e3 * cpu / examples,
                "ratio": cpu / times["plain"][1],
                "peak MiB": networks.peak(name, way),
            }
            for way, (_, cpu) in times.items()
        ]
    return rows
