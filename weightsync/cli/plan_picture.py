"""Who sends to whom, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from weightsync.cost.study import Study
from weightsync.errors import ConfigError, MissingDependencyError

_COLOURS = {"lower": "#999999", "p2p": "#4a7fb5", "broad": "#b5664a"}


def draw(model: str, found: Study, path: Path) -> None:
    """Ranks against ranks, bytes of every card, seconds of every way. Needs matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "bench", "--plot draws with it") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplot_mosaic(
        [["who", "cards"], ["who", "seconds"]], figsize=(15, 8), width_ratios=(1.15, 1)
    )
    _draw_pairs(axes["who"], found, figure)
    _draw_cards(axes["cards"], found)
    _draw_seconds(axes["seconds"], found)
    trainer, engine = (
        ",".join(f"{k}={n}" for k, n in side.items())
        for side in (found.setup.trainer, found.setup.engine)
    )
    figure.suptitle(
        f"{model}: trainer {trainer} to {found.setup.num_engines} engines {engine}, "
        f"{found.setup.wire} on the wire"
    )
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot draw to {path}: {error}") from error
    finally:
        pyplot.close(figure)


def _draw_pairs(axis: Any, found: Study, figure: Any) -> None:
    engine_ranks = found.target.world_size
    pairs = np.zeros((found.source.world_size, engine_ranks * len(found.plans)))
    for number, plan in enumerate(found.plans):
        t = plan.transfers
        np.add.at(pairs, (t.source_rank, number * engine_ranks + t.target_rank), t.num_bytes / 1e9)
    shown = np.ma.masked_equal(pairs, 0)  # white: nothing goes there
    image = axis.imshow(shown, aspect="auto", interpolation="nearest", cmap="viridis_r")
    figure.colorbar(image, ax=axis, label="GB", fraction=0.04)
    for number in range(1, len(found.plans)):
        axis.axvline(number * engine_ranks - 0.5, color="#888888", linewidth=0.5)
    stages = found.setup.trainer.get("pp", 1)
    for stage in range(1, stages):
        axis.axhline(stage * found.source.world_size / stages - 0.5, color="#888888", linewidth=0.5)
    axis.set_xlabel("engine rank, one engine after the other")
    axis.set_ylabel("trainer rank" + (", one pipeline stage after the other" if stages > 1 else ""))
    axis.set_title("who sends to whom")


def _draw_cards(axis: Any, found: Study) -> None:
    trainer = sorted(set(found.cluster.trainer.nic))
    engines = sorted({n for sites in found.cluster.engines for n in sites.nic})
    for loads, style, way in ((found.loads, "-", "p2p"), (found.forwarded, "--", "forwarding")):
        for values, colour, what in (
            (loads.nic_out[trainer], "#4a7fb5", "out of the trainer's"),
            (loads.nic_in[engines], "#7fb54a", "into the engines'"),
        ):
            axis.plot(values / 1e9, style, color=colour, linewidth=1.2, label=f"{what}, {way}")
    axis.set_ylim(bottom=0)
    axis.set_xlabel("network card")
    axis.set_ylabel("GB")
    axis.set_title("bytes of every network card")
    axis.legend(fontsize=8)


def _draw_seconds(axis: Any, found: Study) -> None:
    ways = [e.way for e in found.estimates]
    values = [e.seconds for e in found.estimates]
    colours = [next(c for k, c in _COLOURS.items() if way.startswith(k)) for way in ways]
    bars = axis.barh(ways, values, color=colours)
    axis.bar_label(bars, [f" {v:.2f} s" for v in values])
    axis.invert_yaxis()
    axis.margins(x=0.15)
    axis.set_xlabel("predicted seconds")
