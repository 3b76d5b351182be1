"""The figures of the two pages, and the rows of their tables, from records as
`chapters.Chapter.both` gives them.

Each figure shows itself and gives its digest. Each function of rows takes {"recorded": record,
"live": record}, of which either may be missing, and gives (kind, cells), for `chapters.table`.
"""

import numpy as np

from dpcompanion.reproduction import plotting
from dpcompanion.reproduction.papers.intrinsic_privacy.distances import LOG_EDGES
from dpcompanion.reproduction.papers.intrinsic_privacy.grids import INITIALIZATIONS
from dpcompanion.reproduction.papers.intrinsic_privacy.sensitivity import NAMES

_DISTANCES = {
    "data": ("data", "recorded"),
    "seed.fixed": ("seed, fixed start", "estimate"),
    "seed.varying": ("seed, varying start", "intrinsic"),
}


def _plain(name):
    return name.replace(".", "_").replace("-", "_")


def _panels(found):
    """(kind, task) of the panels of a figure: all that is recorded, and the first live one."""
    recorded = [("recorded", name) for name in found["recorded"].config["tasks"]]
    return recorded + [("live", list(found["live"].config["tasks"])[0])]


def _rows(found, cells):
    """(kind, cells) for each task and start."""
    live = {"live": " (live)"}
    return [
        (
            kind,
            [
                f"{NAMES[name]}, {start} start{live.get(kind, '')}",
                *cells(record, name, f"{name}.{start}"),
            ],
        )
        for kind, record in found.items()
        for name in record.config["tasks"]
        for start in INITIALIZATIONS
    ]


def _stack(panels, height, **options):
    """Axes below each other, one for each panel."""
    return plotting.figure(rows=len(panels), height=height, squeeze=False, **options)[1][:, 0]


def _histogram(ax, counts, **style):
    middle, share = 10 ** ((LOG_EDGES[1:] + LOG_EDGES[:-1]) / 2), counts / counts.sum()
    shown = slice(np.flatnonzero(counts)[0], np.flatnonzero(counts)[-1] + 1)
    ax.fill_between(middle[shown], share[shown], step="mid", alpha=0.3, color=style["color"])
    ax.step(middle[shown], share[shown], where="mid", linewidth=1.2, **style)


def answer(found):
    """Claimed epsilons and the attack's lower bounds, from records of algorithm 1."""
    import matplotlib.pyplot as plt

    fig, ax = plotting.figure(height=4.0)
    labels, shown = [], {"claimed": [], "claimed_empirical": [], "attacked": []}
    for kind, record in found.items():
        for name in record.config["tasks"]:
            for start in INITIALIZATIONS:
                value = {
                    q: record.values[f"{name}.{start}.canary.{q}"]
                    for q in ("epsilon_claimed", "epsilon_claimed_star", "epsilon_of_mu_audited")
                }
                y, seen = -len(labels), max(value["epsilon_of_mu_audited"])
                bar = {"markersize": 16, "markeredgewidth": 3}
                if not name.endswith("-unscaled"):
                    ax.plot(
                        value["epsilon_claimed"], y, "|", color=plotting.COLORS["worst case"], **bar
                    )
                ax.plot(
                    value["epsilon_claimed_star"],
                    y,
                    "|",
                    color=plotting.COLORS["non-private"],
                    **bar,
                )
                ax.plot(seen, y, ">", color=plotting.COLORS[kind], markersize=8)
                labels.append(
                    f"{NAMES[name]},\n{start} start" + (" (live)" if kind == "live" else "")
                )
                for key, each in zip(
                    shown, (value["epsilon_claimed"], value["epsilon_claimed_star"], seen)
                ):
                    shown[key].append(each)
    ax.set(
        xscale="log",
        xlabel="epsilon",
        yticks=-np.arange(len(labels)),
        ylim=(-len(labels) + 0.5, 0.5),
    )
    ax.set_yticklabels(labels)
    plt.show()
    return plotting.digest(digits=3, **shown)


def paths(found):
    """Figure 1: two weights during training, of the first six runs."""
    import matplotlib.pyplot as plt

    fig, axes = plotting.figure(columns=2, height=3.4)
    for ax, (kind, record) in zip(axes, found.items()):
        for path in np.moveaxis(record.arrays["path"][:, :6], 1, 0):
            ax.plot(*path.T, linewidth=1, alpha=0.8)
            ax.plot(*path[-1], "o", color="black", markersize=4)
        ax.plot(*record.arrays["path"][0, 0], "s", color="black", markersize=6)
        i, j = record.config["coordinates"]
        ax.set(
            title=f"{NAMES[next(iter(record.config['tasks']))]} ({kind})",
            xlabel=f"weight {i}",
            ylabel=f"weight {j}",
        )
    plt.show()
    return plotting.digest(
        digits=3, **{kind: record.arrays["path"][:, :6] for kind, record in found.items()}
    )


def distances(found, panels=None):
    """Figure 2: distances of two runs, and theorem 2's bound; `panels`: (kind, task), or all."""
    import matplotlib.pyplot as plt

    panels = panels or _panels(found)
    axes = _stack(panels, 1.8, sharex=True)
    for ax, (kind, name) in zip(axes, panels):
        for key, (label, color) in _DISTANCES.items():
            _histogram(
                ax, found[kind].arrays[f"{name}.{key}"], color=plotting.COLORS[color], label=label
            )
        if f"{name}.bound" in found[kind].values:
            ax.axvline(
                found[kind].values[f"{name}.bound"], color="black", linestyle="--", linewidth=1
            )
        ax.set(xscale="log", title=f"{NAMES[name]} ({kind})", yticks=[])
    axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    axes[-1].set_xlabel("distance between the weights of two runs")
    shown = {
        _plain(f"{name}_{key}"): [
            found[kind].values[f"{name}.{key}.{q}"] for q in ("min", "median", "max")
        ]
        for kind, name in panels
        for key in _DISTANCES
    }
    plt.show()
    return plotting.digest(digits=3, **shown)


def normality(record):
    """Figure 3: p-values of the test of each weight."""
    import matplotlib.pyplot as plt

    fig, ax = plotting.figure(height=4.4)
    for (key, p), line in zip(record.arrays.items(), ("-", "--", "-", "--")):
        name, start = key.rsplit(".", 1)
        ax.step(
            np.sort(p.ravel()),
            np.linspace(0, 1, p.size),
            linestyle=line,
            label=f"{NAMES[name]}, {start} start",
            color=plotting.COLORS["recorded" if name == "mnist-binary" else "estimate"],
        )
    line = np.geomspace(1e-5, 1, 200)
    ax.plot(line, line, color="black", linewidth=1, label="Gaussian")
    ax.axvline(0.05, color="grey", linestyle=":")
    ax.axvline(0.05 / 51, color="grey", linestyle="--")
    ax.set(xscale="log", xlim=(1e-5, 1), xlabel="p-value", ylabel="share of weights")
    fig.legend(loc="outside upper center")
    plt.show()
    return plotting.digest(digits=3, **{_plain(key): p for key, p in record.arrays.items()})


def pairs(found):
    """Figure 4: epsilon of each pair of data sets."""
    import matplotlib.pyplot as plt

    panels = _panels(found)
    axes = _stack(panels, 1.5, sharex=True)
    for ax, (kind, name) in zip(axes, panels):
        _histogram(ax, found[kind].arrays[f"{name}.analytic"], color=plotting.COLORS["intrinsic"])
        ax.set(xscale="log", xlim=(1e-3, 20), title=f"{NAMES[name]} ({kind})", yticks=[])
    axes[-1].set_xlabel("epsilon of a pair")
    plt.show()
    return plotting.digest(
        digits=3,
        **{
            _plain(f"{kind}_{name}"): [
                found[kind].values[f"{name}.analytic.{q}"] for q in ("median", "max")
            ]
            for kind, name in panels
        },
    )


def utility(found, prefix=""):
    """Figures 5 and 9: accuracy over epsilon, with all the noise and with augmented noise."""
    import matplotlib.pyplot as plt

    panels, curves = _panels(found), {}
    axes = _stack(panels, 1.9, sharex=True)
    for ax, (kind, name) in zip(axes, panels):
        record = found[kind]
        for setting, color in (("deterministic", "worst case"), ("augmented", "intrinsic")):
            for sensitivity, line in (("theory", "-"), ("empirical", "--")):
                curve = record.arrays[f"{name}.classical.{sensitivity}.{setting}"]
                ax.plot(
                    record.arrays["epsilons"],
                    curve,
                    color=plotting.COLORS[color],
                    linestyle=line,
                    linewidth=1.4,
                )
                curves[_plain(f"{name}_{sensitivity}_{setting}")] = curve
        ax.axhline(
            record.values[f"{prefix}{name}.noiseless"],
            color=plotting.COLORS["non-private"],
            linewidth=0.8,
        )
        ax.set(xscale="log", title=f"{NAMES[name]} ({kind})", ylabel="accuracy")
    axes[-1].set_xlabel("epsilon")
    plt.show()
    return plotting.digest(digits=3, **curves)


def spectra(record, names=None):
    """The standard deviation of the weights along principal directions, and the pooled one, of some
    tasks, all by default; from a record of algorithm 1.
    """
    import matplotlib.pyplot as plt

    names = names or list(record.config["tasks"])
    axes = _stack(names, 1.9)
    for ax, name in zip(axes, names):
        for start, color in (
            ("varying", plotting.COLORS["intrinsic"]),
            ("fixed", plotting.COLORS["estimate"]),
        ):
            row = f"{name}.{start}.natural"
            ax.plot(record.arrays[f"{row}.spectrum"], color=color, label=f"{start} start")
            ax.axhline(record.values[f"{row}.sigma_i"], color=color, linestyle=":")
        ax.set(yscale="log", title=NAMES[name], ylabel="deviation")
    axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    axes[-1].set_xlabel("direction")
    plt.show()
    return plotting.digest(
        digits=3,
        **{
            _plain(key): array
            for key, array in record.arrays.items()
            if key.endswith("natural.spectrum") and key.split(".")[0] in names
        },
    )


def needed(record):
    """What algorithm 2 promises and what the covariance says that it gives, from a record of it."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, NullFormatter

    names, drawn = list(record.config["tasks"]), {}
    axes = _stack(names, 2.1, sharex=True)
    for ax, name in zip(axes, names):
        value, row = record.values, f"{name}.varying.canary"
        targets = value[f"{row}.targets"]
        ax.plot(targets, targets, color="black", linewidth=0.8)
        for sensitivity, line in (("theory", "-"), ("empirical", "--")):
            if sensitivity == "empirical" or not name.endswith("-unscaled"):
                drawn[_plain(f"{name}_{sensitivity}")] = value[
                    f"{row}.{sensitivity}.epsilon_covariance"
                ]
                ax.plot(
                    targets,
                    value[f"{row}.{sensitivity}.epsilon_covariance"],
                    linestyle=line,
                    color=plotting.COLORS["intrinsic"],
                )
        ax.plot(
            targets,
            value[f"{row}.empirical.epsilon_of_mu_audited"],
            "x",
            color=plotting.COLORS["live"],
        )
        ax.set(xscale="log", yscale="log", title=NAMES[name], ylabel="epsilon achieved")
        for axis, ticks in ((ax.xaxis, [1, 2, 4, 8]), (ax.yaxis, [0.25, 0.5, 1, 2, 4, 8, 16])):
            axis.set(major_locator=FixedLocator(ticks), minor_formatter=NullFormatter())
            axis.set_major_formatter("{x:g}")
    axes[-1].set_xlabel("target epsilon")
    plt.show()
    return plotting.digest(digits=3, **drawn)


def claim_rows(found):
    """Claims of algorithm 1 against the canary, and what the attack shows."""

    def cells(record, name, row):
        v = {
            q: record.values[f"{row}.canary.{q}"]
            for q in (
                "mu_claimed",
                "mu_claimed_star",
                "mu_audited",
                "epsilon_claimed",
                "epsilon_claimed_star",
                "epsilon_audited",
                "epsilon_of_mu_audited",
            )
        }
        seen = max(v["mu_audited"])
        theory = f"{v['epsilon_claimed']:.2f}{', refuted' if seen > v['mu_claimed'] else ''}"
        star = (
            f"{v['epsilon_claimed_star']:.2f}{', refuted' if seen > v['mu_claimed_star'] else ''}"
        )
        return [
            "no theorem" if name.endswith("-unscaled") else theory,
            star,
            f"{max(v['epsilon_of_mu_audited']):.2f}",
            f"{max(v['epsilon_audited']):.2f}",
        ]

    return _rows(found, cells)


def mu_rows(found, neighbor):
    """mu of a kind's worst neighbour: by pooled sigma, covariance, and the attack (lower bound)."""

    def cells(record, name, row):
        v = {
            q: record.values[f"{row}.{neighbor}.{q}"]
            for q in ("mu_pooled", "mu_covariance", "mu_audited")
        }
        worst = int(np.argmax(v["mu_covariance"]))
        pooled, covariance, audited = (v[q][worst] for q in v)
        return [
            f"{pooled:.2f}{', refuted' if audited > pooled else ''}",
            f"{covariance:.2f}",
            f"{audited:.2f}",
        ]

    return _rows(found, cells)


def tail_rows(found):
    """How heavy the tails are, over single weights and in the direction of the worst neighbour."""

    def cells(record, name, row):
        v = {
            q: record.values[f"{row}.natural.{q}"]
            for q in ("kurtosis_weights", "kurtosis_worst", "beyond_3_sigma", "beyond_4_sigma")
        }
        return [
            f"{v['kurtosis_weights']:+.2f}",
            f"{v['kurtosis_worst']:+.2f}",
            f"{100 * v['beyond_3_sigma']:.2f}%",
            f"{100 * v['beyond_4_sigma']:.3f}%",
        ]

    return _rows(found, cells)


def noise_rows(found, target):
    """Algorithm 2's noise for a target epsilon, what it gives, and what would be enough."""

    def cells(record, name, row):
        k = record.values[f"{row}.canary.targets"].index(target)
        v = {
            f"{a}.{b}": record.values[f"{row}.canary.{a}.{b}"][k]
            for a in ("theory", "empirical", "needed")
            for b in ("added", "epsilon_covariance", "epsilon_of_mu_audited")
        }
        return [
            "-" if name.endswith("-unscaled") else f"{v['theory.added']:.3f}",
            f"{v['empirical.added']:.3f}",
            f"{v['empirical.epsilon_covariance']:.2f} / {v['empirical.epsilon_of_mu_audited']:.2f}",
            f"{v['needed.added']:.3f}",
        ]

    return _rows(found, cells)
