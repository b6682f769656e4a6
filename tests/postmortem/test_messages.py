"""Every form of message, with all its numbers. data/messages.json: real reports, with the figures that a person read off them."""

import json
from pathlib import Path

import pytest

from ullage.postmortem.messages import numbers_of
from ullage.postmortem.signs import sign_of
from ullage.postmortem.source import read_input
from ullage.units import GIB, KIB, MIB, parse_bytes

MESSAGES = json.loads((Path(__file__).parent / "data" / "messages.json").read_text())
NAMES = {
    "tried": "tried_bytes",
    "capacity": "capacity_bytes",
    "allocated": "allocated_bytes",
    "free": "free_bytes",
    "reserved": "reserved_bytes",
}


def _bytes(said: object) -> int:
    return parse_bytes(str(said).removesuffix(" bytes"))


@pytest.mark.parametrize("case", MESSAGES, ids=[case["id"] for case in MESSAGES])
def test_a_reported_message_parses_with_all_its_numbers(case: dict[str, object]) -> None:
    found = read_input(str(case["text"]))
    assert found.ran_out
    said = case["numbers"]
    assert isinstance(said, dict)
    for name, field in NAMES.items():
        if name in said:
            assert getattr(found.numbers, field) == _bytes(said[name]), name
    if "gpu" in said:
        assert found.numbers.device == said["gpu"]
    if "reserved_unallocated" in said:
        unallocated = _bytes(said["reserved_unallocated"])
        assert found.numbers.reserved_bytes == found.numbers.allocated_bytes + unallocated
    if "process_in_use" in said:
        number = float(str(said["process_in_use"]).split()[0])
        assert found.numbers.process_bytes in (int(number * GIB), int(number))


def test_every_number_of_the_newest_form() -> None:
    found = numbers_of(
        "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 3 has a total capacity of 79.11 GiB of which 1.00 GiB is free. "
        "Process 11 has 2.00 GiB memory in use. Process 12 has 512.00 MiB memory in use. Including non-PyTorch memory, this "
        "process has 75.61 GiB memory in use. 70.00 GiB allowed; Of the allocated memory 60.00 GiB is allocated by PyTorch, "
        "with 3.00 GiB allocated in private pools (e.g., CUDA Graphs), and 10.00 GiB is reserved by PyTorch but unallocated."
    )
    assert found.tried_bytes == 3 * GIB // 2
    assert found.device == 3
    assert found.free_bytes == GIB
    assert found.other_processes_bytes == 2 * GIB + 512 * MIB
    assert found.process_bytes == int(75.61 * GIB)
    assert found.allowed_bytes == 70 * GIB
    assert found.allocated_bytes == 60 * GIB
    assert found.private_pools_bytes == 3 * GIB
    assert found.reserved_bytes == 70 * GIB


def test_every_number_of_cuda_malloc_async() -> None:
    """c10/cuda/CUDAMallocAsyncAllocator.cpp: a number a line; without a fraction set, its limit is none."""
    found = read_input(
        "[rank1]: torch.OutOfMemoryError: Allocation on device 1 would exceed allowed memory. (out of memory)\n"
        "[rank1]: Currently allocated     : 9.43 GiB\n[rank1]: Requested               : 640.00 MiB\n"
        "[rank1]: Device limit            : 11.59 GiB\n[rank1]: Free (according to CUDA): 7.12 MiB\n"
        "[rank1]: PyTorch limit (set by user-supplied memory fraction)\n[rank1]:                         : 17179869184.00 GiB\n"
    )
    numbers = found.numbers
    assert found.recognised == "cuda-oom"
    assert (numbers.tried_bytes, numbers.allocated_bytes, numbers.device) == (640 * MIB, int(9.43 * GIB), 1)
    assert (numbers.capacity_bytes, numbers.free_bytes) == (int(11.59 * GIB), int(7.12 * MIB))
    assert numbers.sane(numbers.allowed_bytes) is None


def test_metal_says_gb_and_means_gib() -> None:
    found = numbers_of(
        "MPS backend out of memory (MPS allocated: 17.98 GB, other allocations: 1.26 MB, max allowed: 18.13 GB)."
    )
    assert (found.allocated_bytes, found.allowed_bytes) == (int(17.98 * GIB), int(18.13 * GIB))
    assert found.process_bytes == int(17.98 * GIB) + int(1.26 * MIB)


def test_in_a_container_this_process_is_told_as_another() -> None:
    """verl-project/verl#2828: the driver's number of this process is not the one that it has in its container."""
    found = numbers_of(
        "CUDA out of memory. Tried to allocate 13.91 GiB. GPU 0 has a total capacity of 79.11 GiB of which 8.85 GiB is free. Process 23444 "
        "has 70.25 GiB memory in use. Of the allocated memory 60.49 GiB is allocated by PyTorch, and 6.77 GiB is reserved by PyTorch but "
        "unallocated."
    )
    assert (found.process_bytes, found.other_processes_bytes) == (int(70.25 * GIB), None)


def test_a_process_that_leaves_room_for_this_one_is_another() -> None:
    found = numbers_of(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.00 GiB is free. Process 7 has "
        "70.00 GiB memory in use. Of the allocated memory 7.00 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but "
        "unallocated."
    )
    assert (found.process_bytes, found.other_processes_bytes) == (None, 70 * GIB)


def test_this_process_among_several_is_the_one_that_holds_what_torch_has() -> None:
    """huggingface/trl#5207: four test workers on one card."""
    found = numbers_of(
        "CUDA out of memory. Tried to allocate 76.00 MiB. GPU 0 has a total capacity of 14.74 GiB of which 42.19 MiB is free. "
        "Process 21219 has 284.00 MiB memory in use. Process 21222 has 3.40 GiB memory in use. Process 21213 has 258.00 MiB memory in use. "
        "Process 21216 has 10.77 GiB memory in use. Of the allocated memory 10.59 GiB is allocated by PyTorch, and 42.18 MiB is reserved "
        "by PyTorch but unallocated."
    )
    assert found.process_bytes == int(10.77 * GIB)
    assert found.other_processes_bytes == 284 * MIB + int(3.40 * GIB) + 258 * MIB


def test_processes_of_which_the_driver_hides_what_they_hold() -> None:
    """huggingface/trl#3172: in a container, 0 bytes of every rank that opened the first card."""
    found = numbers_of(
        "CUDA out of memory. Tried to allocate 130.00 MiB. GPU 0 has a total capacity of 79.10 GiB of which 12.81 MiB is free. "
        "Process 3427 has 0 bytes memory in use. Process 3423 has 0 bytes memory in use. Including non-PyTorch memory, this process has 0 "
        "bytes memory in use. Of the allocated memory 10.47 GiB is allocated by PyTorch, and 93.52 MiB is reserved by PyTorch but "
        "unallocated."
    )
    assert (found.process_bytes, found.other_processes_bytes, found.other_processes_count) == (0, None, 2)


def test_this_process_where_torch_counts_more_than_the_card_has() -> None:
    """verl-project/verl#3366: an engine that sleeps in this process has given back what torch goes on counting."""
    found = numbers_of(
        "CUDA out of memory. Tried to allocate 260.00 MiB. GPU 0 has a total capacity of 79.14 GiB of which 49.75 MiB is free. Process "
        "626716 has 79.04 GiB memory in use. Of the allocated memory 94.21 GiB is allocated by PyTorch, with 86.34 MiB allocated in "
        "private pools (e.g., CUDA Graphs), and 261.95 MiB is reserved by PyTorch but unallocated."
    )
    assert (found.process_bytes, found.other_processes_bytes) == (int(79.04 * GIB), None)


def test_the_oldest_form() -> None:
    found = numbers_of(
        "CUDA out of memory. Tried to allocate 2.00 MiB (GPU 0; 11.17 GiB total capacity; 10.65 GiB already allocated; "
        "1.56 MiB free; 200.00 KiB cached)"
    )
    assert (found.tried_bytes, found.device) == (2 * MIB, 0)
    assert (found.free_bytes, found.reserved_bytes) == (int(1.56 * MIB), 200 * KIB)


@pytest.mark.parametrize(
    ("text", "recognised"),
    [
        ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 4.00 GiB.", "hip-oom"),
        ("RuntimeError: HIP error: out of memory", "hip-oom"),
        ("rocm_driver.cc:600] failed to allocate 890.06M (933298432 bytes) from device: HIP_ERROR_OutOfMemory", "hip-oom"),
        ("RuntimeError: Current platform can NOT allocate memory block with size larger than 4GB! Tried to allocate 6.85 GiB", "cuda-oom"),
        ("RuntimeError: Allocation is out of device memory on current platform.", "cuda-oom"),
        ("RuntimeError: Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)", "cuda-oom"),
        ("Memory_Allocation_Failure(EL0004): Failed to allocate memory requested by GE module.", "cuda-oom"),
        ("RuntimeError: Device(id:0) memory isn't enough and alloc failed, kernel name: Default/AddN, alloc size: 1048576B.", "cuda-oom"),
        ("synStatus=9 [Device-side allocation failed] Device memory allocation failed.", "cuda-oom"),
        ("std::runtime_error: [malloc_or_wait] Unable to allocate 12 bytes.", "cuda-oom"),
        ("RuntimeError: [malloc] Unable to allocate 12 bytes.", "cuda-oom"),
        ("[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPUCommandBufferCallback)", "cuda-oom"),
        ("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62", "cuda-oom"),
        ("how to address the out of memory issue: https://docs.ray.io/en/latest/ray-core/scheduling/ray-oom-prevention.html", "host-oom"),
        ("torch.AcceleratorError: CUDA error: out of memory", "cuda-oom"),
        ("RuntimeError: CUDA driver error: out of memory", "cuda-oom"),
        ("RuntimeError: cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/generic/THCStorage.cu:58", "cuda-oom"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "cuda-oom"),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "cuda-oom"),
        ("RuntimeError: No executable batch size found, reached zero.", "cuda-oom"),
        ("jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 4294967296 bytes.", "cuda-oom"),
        ("include/alloc.h:228 NCCL WARN Cuda failure 2 'out of memory'", "nccl-oom"),
        ("node1: NCCL WARN Failed to CUDA calloc async 608 bytes", "nccl-oom"),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:75] . DefaultCPUAllocator: can't allocate memory: you tried to "
         "allocate 34359738368 bytes. Error code 12 (Cannot allocate memory)", "host-oom"),
        ("numpy.core._exceptions._ArrayMemoryError: Unable to allocate 12.3 GiB for an array with shape (1, 2)", "host-oom"),
        ("[12345.6] Out of memory: Killed process 4242 (python) total-vm:1kB, anon-rss:2kB", "host-oom"),
        ("slurmstepd: error: Detected 1 oom-kill event(s) in StepId=1.0.", "host-oom"),
        ("torch.distributed.elastic: failed (exitcode: -9) local_rank: 3 (pid: 1) of binary: python", "host-oom"),
        ("[launch.py:321:sigkill_handler] exits with return code = -9", "host-oom"),
        ("subprocess.CalledProcessError: Command died with <Signals.SIGKILL: 9>.", "host-oom"),
        ("Killed", "host-oom"),
        ("ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.", "host-oom"),
        ("ERROR: Unexpected bus error: insufficient shared memory (shm)", "host-oom"),
        ('RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":1131', "cuda-oom"),
        ("RuntimeError: Triton Error [CUDA]: out of memory", "cuda-oom"),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", "cuda-oom"),
        ("RuntimeError: cublaslt_gemm.cu:300 in function cublas_gemm: cuBLAS Error: the resource allocation failed", "cuda-oom"),
        ("RuntimeError: [Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::939524096 (896)MB", "cuda-oom"),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "cuda-oom"),
        ("ValueError: The model's max seq len (131072) is larger than the maximum number of tokens that can be stored in KV cache (93936).",
         "cuda-oom"),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", "host-oom"),
        ("(raylet) 1 Workers (tasks / actors) killed due to memory pressure (OOM)", "host-oom"),
        ("ray.exceptions.ObjectStoreFullError: Failed to put object ffff in object store because it is full.", "host-oom"),
        ("systemd-oomd[812]: Killed /user.slice/x due to memory pressure for /user.slice being 80% > 50%", "host-oom"),
        ('sending SIGTERM to process 4242 uid 0 "python": badness 900, VmRSS 90000 MiB', "host-oom"),
        ("The node was low on resource: memory. Threshold quantity: 100Mi, available: 50Mi.", "host-oom"),
        ("srun: error: node1: task 0: Out Of Memory", "host-oom"),
        ("srun: error: node1: tasks 0-3,7: Out Of Memory", "host-oom"),
        ("12345.batch  OUT_OF_ME+  0:125", "host-oom"),
        ("TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.", "host-oom"),
        ("=>> PBS: job killed: mem 132534kb exceeded limit 131072kb", "host-oom"),
        ("pyarrow.lib.ArrowMemoryError: malloc of size 134217728 failed", "host-oom"),
        ("OSError: [WinError 1455] The paging file is too small for this operation to complete.", "host-oom"),
        ("NCCL WARN Error while creating shared memory segment /dev/shm/nccl-abc (size 9637888)", "host-oom"),
        ("RuntimeError: unable to write to file </torch_12_34_5>: No space left on device (28)", "host-oom"),
        ("RuntimeError: DataLoader worker (pid(s) 1234) exited unexpectedly", "not-oom"),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "not-oom"),
        ("CUDA error: device-side assert triggered", "not-oom"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "not-oom"),
        ("triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456", "not-oom"),
        ("[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)", "not-oom"),
        ("OSError: [Errno 28] No space left on device", "not-oom"),
        ("ValueError: too many values to unpack", "not-oom"),
    ],
)  # fmt: skip
def test_what_kind_of_failure(text: str, recognised: str) -> None:
    sign = sign_of(text)
    assert sign is not None
    assert sign.recognised == recognised


@pytest.mark.parametrize(
    ("text", "tried"),
    [
        ("NCCL WARN Failed to CUDA calloc 4194304 bytes", 4 * MIB),
        ("DefaultCPUAllocator: not enough memory: you tried to allocate 1024 bytes.", KIB),
        ("CUDA out of memory. Tried to allocate more than 1EB memory.", 10**18),
        ("MPS backend out of memory (MPS allocated: 17.98 GB, other allocations: 1.26 MB, max allowed: 18.13 GB). "
         "Tried to allocate 256 bytes on private pool.", 256),
        ("RuntimeError: Invalid buffer size: 24.00 GB", 24 * GIB),
        ("[metal::malloc] Attempting to allocate 34359738368 bytes which is greater than the maximum allowed buffer size of 22 bytes.",
         32 * GIB),
        ("cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 1,073,741,824 bytes (allocated so far: 2,048 bytes).", GIB),
        ("failed to allocate 10.76G (11553996800 bytes) from device: CUDA_ERROR_OUT_OF_MEMORY: out of memory", 11553996800),
        ("PT_DEVMEM Allocation failed for size::939524096 (896)MB", 896 * MIB),
        ("Allocator ran out of memory trying to allocate 10529419660 Bytes (rounded to 10529419776 Bytes)", 10529419660),
        ("Allocator (GPU_0_bfc) ran out of memory trying to allocate 520.77MiB.", int(520.77 * MIB)),
    ],
)  # fmt: skip
def test_sizes_of_other_allocators(text: str, tried: int) -> None:
    assert numbers_of(text).tried_bytes == tried


def test_how_exact_a_printed_size_is() -> None:
    assert numbers_of("Tried to allocate 3.14 GiB").tried_within_bytes == pytest.approx(0.005 * GIB, rel=1e-6)
    assert numbers_of("Tried to allocate 14.9 GiB").tried_within_bytes == pytest.approx(0.05 * GIB, rel=1e-6)
    assert numbers_of("tried to allocate 512 bytes").tried_within_bytes == 0


def test_a_marker_is_in_every_line_that_its_sign_knows() -> None:
    """Lines without a marker are never looked at."""
    from ullage.postmortem.signs import MARKERS

    for case in MESSAGES:
        assert any(marker in str(case["text"]).lower().encode() for marker in MARKERS)
