"""What every transport must do between two processes of one CUDA device, whole updates at a time."""

from __future__ import annotations

from typing import Any

from processes import open_fds

from transports.test_ipc_cuda import (
    MODULE_BYTES,
    SLACK_BYTES,
    STAGING_BYTES,
    assert_holds,
    engine,
    far_trainer,
    free_bytes,
    make_module,
    placements,
    wait_for_free,
)


class CudaUpdates:
    """A subclass names a transport and a contract. Slots are smaller than the largest tensor."""

    transport: str
    contract: str
    #: What the engine's end keeps on the device: landing memory, tables, kernels, probes.
    kept_bytes = 0

    def options(self, **more: Any) -> dict[str, Any]:
        return {
            "transport": self.transport,
            "contract": self.contract,
            "bucket": "4MiB",
            "num_slots": 3,
            **more,
        }

    @placements
    def test_refits_are_equal_bit_for_bit(self, placement: str) -> None:
        with engine() as (module, receiver), far_trainer() as far:
            far("make", 1)
            far("connect", receiver.url, self.options(placement=placement))
            for version in range(1, 5):
                assert far("refit", version, 100 + version)["outcome"] == "committed"
                assert_holds(module, 100 + version)
            far("close")

    @placements
    def test_opaque_slots_and_a_cast(self, placement: str) -> None:
        import torch

        with engine(opaque=("b", "turned")) as (module, receiver), far_trainer() as far:
            far("make", 1, "float32")
            far("connect", receiver.url, self.options(placement=placement, cast="fp32_to_bf16"))
            for version in (1, 2):
                assert far("refit", version, 5 + version)["outcome"] == "committed"
            expected = make_module(7, "float32")
            for name in ("a", "b", "d", "turned"):
                wanted = getattr(expected, name).data.to(getattr(module, name).dtype)
                assert torch.equal(getattr(module, name).data, wanted), name

    def test_memory_that_was_allocated_again(self) -> None:
        """Perhaps at the same address: never what was there before."""
        with engine() as (module, receiver), far_trainer() as far:
            far("make", 1)
            far("connect", receiver.url, self.options(placement="in_place"))
            for version in range(1, 6):
                far("free")
                far("make", version)
                assert far("refit", version, version)["outcome"] == "committed"
                assert_holds(module, version)

    def test_a_killed_trainers_memory_is_free(self) -> None:
        """While the engine lives, which had it mapped. The first round is for what that keeps."""
        with engine() as (module, receiver):
            held = free_bytes() - STAGING_BYTES - self.kept_bytes
            for seed in range(3):
                with far_trainer() as far:
                    far("make", seed)
                    far("connect", receiver.url, self.options(lease_s=2.0))
                    assert far("refit", 1, seed)["outcome"] == "committed"
                    far.child.kill()
                assert_holds(module, seed)
                wait_for_free(held - SLACK_BYTES)
                if not seed:
                    held = free_bytes()

    def test_the_trainers_memory_is_free_after_it_closed(self) -> None:
        """Before the engine did. The first round is for what both sides keep."""
        with engine() as (_, receiver), far_trainer() as far:
            for seed in range(3):
                far("make", seed)
                held = free_bytes()
                far("connect", receiver.url, self.options())
                far("refit", 1, seed)
                far("close")
                far("free")
                if seed:
                    wait_for_free(held + MODULE_BYTES - 2**21)

    def test_nothing_grows(self) -> None:
        with engine() as (module, receiver), far_trainer() as far:
            far("make", 1)
            # No heartbeat on the way: its connection is a file of its own on either side.
            far("connect", receiver.url, self.options(placement="in_place", lease_s=3600.0))
            for version in range(1, 6):
                fds_there = far("refit", version, version)["fds"]
            fds_here, before = len(open_fds()), free_bytes()
            for version in range(6, 56):
                answer = far("refit", version, version)
            assert_holds(module, 55)
            assert (len(open_fds()), answer["fds"]) == (fds_here, fds_there)
            assert free_bytes() >= before - 2**21

    def test_the_host_is_refused_by_name(self) -> None:
        with engine() as (_, receiver), far_trainer() as far:
            far("make_on_host", 1)
            far("connect", receiver.url, self.options())
            assert "both must lie on" in far.failure("refit_held", 3)


class CudaGenerators(CudaUpdates):
    """A stream: also of tensors that are gone when the next is made."""

    contract = "stream"

    def test_a_generator(self) -> None:
        with engine() as (module, receiver), far_trainer() as far:
            far("make", 1)
            far("connect", receiver.url, self.options(placement="in_place", contract="auto"))
            for version in (1, 2, 3):
                answer = far("refit", version, version, "generator")
                assert answer["outcome"] == "committed"
                assert_holds(module, version)
