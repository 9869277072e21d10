"""How ``weightsync plan`` tells what it found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsync.cost.estimates import Estimate, busiest_card
from weightsync.cost.loads import Loads
from weightsync.cost.study import FORWARDED, P2P, Study
from weightsync.planning.topology import Reach

Int64 = npt.NDArray[np.int64]

_WIDTH = 12


def table(model: str, found: Study) -> str:
    """Everything that a cluster engineer would ask first."""
    setup, loads = found.setup, found.loads
    num = sum(len(p.transfers) for p in found.plans)
    lines = [
        f"weightsync plan: {model}, {len(found.metas):,} tensors, "
        f"{size(found.work.unique_bytes)} as {setup.wire} travels",
        "",
        _row("trainer", f"{found.source.world_size} ranks ({_kinds(setup.trainer)}) on "
             f"{len(set(found.cluster.trainer.host))} hosts, at most "
             f"{size(found.work.held_bytes)} a rank"),
        _row("engines", f"{setup.num_engines} x {found.target.world_size} ranks "
             f"({_kinds(setup.engine)}) on {_engine_hosts(found)} hosts"
             + (", the trainer's" if setup.is_colocated else "")),
        _row("network", f"{setup.line_bytes_per_s / 1e9:.1f} GB/s a card each way, "
             f"{setup.nics_per_host or setup.gpus_per_host} cards and {setup.gpus_per_host} GPUs a host"),
        _row("plan", f"{num:,} transfers, {size(loads.total_bytes)}: "
             + ", ".join(f"{_REACHES[r]} {size(n)}" for r, n in loads.by_reach.items() if n)),
        _row("contract", f"{found.plans[0].contract}: {found.plans[0].contract_reason}"),
        "",
        *_seconds(found),
        "",
        *_links(found),
        "",
        *_constants(found),
    ]  # fmt: skip
    return "\n".join(lines)


_REACHES = {Reach.GPU: "same GPU", Reach.HOST: "NVLink", Reach.NETWORK: "network"}


def _row(name: str, value: str) -> str:
    return f"{name:<{_WIDTH}}{value}"


def _kinds(counts: dict[str, int]) -> str:
    return ", ".join(f"{k}={n}" for k, n in counts.items()) or "one"


def _engine_hosts(found: Study) -> int:
    return len({host for sites in found.cluster.engines for host in sites.host})


def size(num_bytes: float) -> str:
    """Bytes for people, with terabytes."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def _seconds(found: Study) -> Iterator[str]:
    named = (name for e in found.estimates for name, spent_s in e.terms.items() if spent_s)
    order = [name for e in found.estimates[-1:] for name in e.terms]  # a whole way has every term
    names = sorted(dict.fromkeys(named), key=order.index)
    yield f"{'predicted seconds':<30}{'total':>9}" + "".join(f"{n:>11}" for n in names)
    for e in found.estimates:
        terms = "".join(f"{e.terms[n]:>11.4f}" if n in e.terms else f"{'':>11}" for n in names)
        yield f"  {e.way:<28}{e.seconds:>9.3f}{terms}".rstrip()
    yield ""
    yield "bound by"
    for e in found.estimates:
        yield f"  {e.way:<28}{e.bound_by}"
    yield f"{FORWARDED!r} is what the transports would gain by handing boxes on within a host;"
    yield "they do not do that yet."


def _links(found: Study) -> Iterator[str]:
    yield f"{'bytes by link':<30}{'least':>12}{'mean':>12}{'most':>12}   busiest"
    trainer = sorted(set(found.cluster.trainer.nic))
    engines = sorted({n for sites in found.cluster.engines for n in sites.nic})
    for way, loads in ((P2P, found.loads), (FORWARDED, found.forwarded)):
        card, _ = busiest_card(loads, found.cluster)
        yield f"  {way}"
        yield _spread(
            "trainer card, out", loads.nic_out[trainer], card if "sending" in card else ""
        )
        yield _spread("engine card, in", loads.nic_in[engines], card if "receiving" in card else "")
        if loads.by_reach[Reach.HOST]:
            yield _spread("NVLink, into a GPU", loads.nvlink_in, "")
    yield _spread("trainer rank, out", found.loads.trainer_out, _rank(found.loads.trainer_out))
    yield _spread("engine rank, in", found.loads.engine_in, _engine_rank(found))


def _spread(name: str, values: Int64, busiest: str) -> str:
    numbers = (values.min(initial=2**62), values.mean(), values.max(initial=0))
    shown = "".join(f"{size(float(n)):>12}" for n in numbers)
    return f"    {name:<26}{shown}   {busiest}".rstrip()


def _rank(values: Int64) -> str:
    return f"rank {int(np.argmax(values))}"


def _engine_rank(found: Study) -> str:
    engine, rank = divmod(int(np.argmax(found.loads.engine_in)), found.target.world_size)
    return f"engine {engine} rank {rank}"


def _constants(found: Study) -> Iterator[str]:
    yield "constants"
    for f in fields(found.setup.constants):
        c = getattr(found.setup.constants, f.name)
        yield f"  {f.name:<28}{c.value:<12.4g}{c.source}"


def as_json(model: str, found: Study) -> dict[str, Any]:
    """The same and every link, as plain JSON."""
    setup = found.setup
    return {
        "model": model,
        "wire": setup.wire,
        "trainer": {"layout": setup.trainer, "ranks": found.source.world_size},
        "engines": {
            "layout": setup.engine, "count": setup.num_engines, "ranks": found.target.world_size,
        },
        "line_bytes_per_s": setup.line_bytes_per_s,
        "num_tensors": len(found.metas),
        "model_bytes": found.work.unique_bytes,
        "num_transfers": sum(len(p.transfers) for p in found.plans),
        "contract": found.plans[0].contract.value,
        "contract_reason": found.plans[0].contract_reason,
        "estimates": [_estimate(e) for e in found.estimates],
        "p2p": _loads(found.loads),
        "p2p_forwarding": _loads(found.forwarded),
        "constants": setup.constants.to_json(),
    }  # fmt: skip


def _estimate(e: Estimate) -> dict[str, Any]:
    return {"way": e.way, "seconds": e.seconds, "terms": dict(e.terms), "bound_by": e.bound_by}


def _loads(loads: Loads) -> dict[str, Any]:
    arrays = {
        f.name: getattr(loads, f.name).tolist() for f in fields(loads) if f.name != "by_reach"
    }
    reach = {_REACHES[r].replace(" ", "_"): n for r, n in loads.by_reach.items()}
    return {**arrays, "bytes_by_reach": reach}
