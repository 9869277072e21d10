"""The extension built from csrc/. Raw addresses are ints; use weightsync.native instead."""

from typing import TypedDict, type_check_only

NUM_SEGMENT_COLUMNS: int
NUM_DIGEST_COLUMNS: int

@type_check_only
class BuildInfo(TypedDict):
    compiler: str
    copy_kernel: str
    digest_kernel: str
    cuda: str | None

def copy_segments(
    table_ptr: int,
    num_segments: int,
    num_threads: int,
    cancel_ptr: int = 0,
    progress_ptr: int = 0,
) -> int: ...
def digest_segments(table_ptr: int, num_rows: int, out_ptr: int, num_threads: int) -> None: ...
def read_process_segments(
    pid: int,
    table_ptr: int,
    num_segments: int,
    num_threads: int,
    cancel_ptr: int = 0,
    progress_ptr: int = 0,
) -> int: ...
def memcpy_bytes(target_ptr: int, source_ptr: int, num_bytes: int, num_threads: int) -> None: ...
def prefault(ptr: int, num_bytes: int) -> None: ...
def has_cuda() -> bool: ...
def build_info() -> BuildInfo: ...
