"""How a result of ``bench`` is shown."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weightsync.cli.bench_growth import describe
from weightsync.errors import MissingDependencyError
from weightsync.types import format_bytes

_WIDTH = 22


def table(result: Mapping[str, Any]) -> str:
    """The result for people."""
    total, seconds = result["total_bytes"], result["seconds"]
    lines = [
        f"weightsync bench: {result['model']} by {result['transport']} ({result['contract']}, "
        f"{result['placement']}) on {result['device']}",
        "",
        row("tensors", f"{result['num_tensors']:,}"),
        row("bytes", f"{format_bytes(total)} ({total:,} B)"),
        row("path", result["path"]),
        row("bucket", format_bytes(result["bucket_bytes"])),
        "",
        f"{'phase':<{_WIDTH}}{'seconds':>10}{'GB/s':>9}",
    ]
    moving = {"pack", "move", "read_device", "digest", "verify", "place", "read_back"}
    for name, spent_s in result["phases"].items():
        rate = f"{total / spent_s / 1e9:9.2f}" if name in moving and spent_s > 0 else " " * 9
        note = {
            "pack": "   within the move",
            "read_device": "   within the move, by the device's clock",
            "first_refit": "   with plan and register",
        }
        label = "  " + name.replace("_", " ")
        lines.append(f"{label:<{_WIDTH}}{spent_s:>10.4f}{rate}{note.get(name, '')}".rstrip())
    lines.append(
        f"{'refit (median)':<{_WIDTH}}{seconds['median']:>10.4f}{result['gb_per_s']:9.2f}"
        f"   min {seconds['min']:.4f}, p99 {seconds['p99']:.4f}, {result['repeat']} repeats"
    )
    stages_s = result["begin_to_commit_seconds"]
    lines.append(
        f"{'  begin to commit':<{_WIDTH}}{stages_s:>10.4f}{total / stages_s / 1e9:9.2f}"
        "   without publishing and digesting the source before"
    )
    lines += ["", *_limits(result)]
    if result["growth"] is not None:
        lines += [row("growth", text) for text in describe(result["growth"])]
    lines.append("")
    if "traffic" in result:
        lines.append(row("traffic", _served(result["traffic"])))
    lines.append(row("verified", _verdict(result)))
    return "\n".join(lines)


def row(name: str, value: str) -> str:
    """One line: a name and its value."""
    return f"{name:<{_WIDTH}}{value}"


def _served(traffic: Mapping[str, Any]) -> str:
    if traffic["failures"]:
        return f"FAILED: {traffic['failures'][0]}"
    return (
        f"{traffic['num_tokens']:,} tokens of {traffic['num_requests']:,} requests, none failed, "
        f"under versions {', '.join(map(str, traffic['versions']))} "
        f"({traffic['tokens_per_s']:,.0f} tokens/s)"
    )


def _verdict(result: Mapping[str, Any]) -> str:
    different = result["num_tensors_that_differ"]
    if result["verified"]:
        also = "" if different is None else "; drawn anew, they equal it bit for bit"
        return f"yes: the engine's live tensors digest as the trainer's, after every refit{also}"
    if different:
        return f"NO: {different} tensors of the engine are not what was drawn"
    if "traffic" in result and result["traffic"]["failures"]:
        return "NO: the engine did not serve all the while"
    return "NO: digests of the engine's live tensors differ from the trainer's"


def _limits(result: Mapping[str, Any]) -> list[str]:
    fitted = result["fit"]
    rate = fitted["gb_per_s"]
    bandwidth = "no cost of bytes seen" if rate is None else f"{rate:.2f} GB/s"
    return [
        row("ceiling", f"{result['ceiling_gb_per_s']:.2f} GB/s ({result['ceiling']}, this run)"),
        row(
            "fraction of ceiling",
            f"{result['fraction_of_ceiling']:.1%} whole refit, "
            f"{result['move_fraction_of_ceiling']:.1%} move phase{_read_fraction(result)}",
        ),
        row(
            "fit of the move",
            f"{fitted['bucket_s'] * 1e3:.3f} ms a bucket + {fitted['tensor_s'] * 1e6:.2f} us a "
            f"tensor + bytes at {bandwidth} (residual {fitted['relative_error']:.0%})",
        ),
        row("pause of the engine", f"{result['pause_seconds']:.4f} s"),
        *_memory(result),
    ]


def _read_fraction(result: Mapping[str, Any]) -> str:
    spent_s = result["phases"].get("read_device")
    if not spent_s:
        return ""
    rate = result["total_bytes"] / spent_s / 1e9
    return f", {rate / result['ceiling_gb_per_s']:.1%} the read alone"


def _memory(result: Mapping[str, Any]) -> list[str]:
    staged = format_bytes(result["placement_bytes"])
    trainer, engine = (
        format_bytes(result[f"{role}_extra_bytes"]) for role in ("trainer", "engine")
    )
    if result["device"] == "cpu":
        peak = format_bytes(result["peak_extra_bytes"])
        beyond = f"beyond its staging copy of {staged}"
        return [row("peak extra memory", f"{peak} (trainer {trainer}, engine {engine} {beyond})")]
    device = format_bytes(result["device_extra_bytes"])
    return [
        row("extra device memory", f"{device} at the peak, a staging copy of {staged} included"),
        row("extra host memory", f"trainer {trainer}, engine {engine}"),
    ]


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Phases and rates as a picture. Needs matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "bench", "--plot draws with it") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), width_ratios=(2, 1))
    once = {"connect", "plan", "register", "first_refit"}
    phases = {k.replace("_", " "): v for k, v in result["phases"].items() if k not in once}
    left.barh(list(phases), [v * 1e3 for v in phases.values()], color="#4a7fb5")
    left.invert_yaxis()
    left.set_xlabel("milliseconds (median)")
    left.set_title(f"{result['model']} by {result['transport']}, {result['contract']}")
    rates = {
        "refit": result["gb_per_s"],
        "move": result["move_gb_per_s"],
        "ceiling": result["ceiling_gb_per_s"],
    }
    right.bar(list(rates), list(rates.values()), color=["#4a7fb5", "#7fb54a", "#999999"])
    right.set_ylabel("GB/s")
    right.set_title(result["ceiling"])
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
