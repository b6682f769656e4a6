"""The lines by which a log tells of memory that ran out, and of deaths that were none of it: one row each, the most telling first."""

from __future__ import annotations

import re
from functools import cache
from typing import Literal, NamedTuple

Recognised = Literal["cuda-oom", "hip-oom", "nccl-oom", "host-oom", "not-oom", "unknown"]


class Sign(NamedTuple):
    """``markers``: lower-case texts of which one stands in every line that ``pattern`` knows; what: it in words.

    weight: of two signs in one log the heavier is what happened; the other follows from it. pattern: compiled when a line first has
    one of the markers, as most never do.
    """

    recognised: Recognised
    weight: int
    what: str
    markers: tuple[str, ...]
    pattern: str

    def knows(self, text: str, lower: str) -> bool:
        """lower: the text in lower case."""
        return any(marker in lower for marker in self.markers) and _compiled(self.pattern).search(text) is not None


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE)


def _sign(recognised: Recognised, weight: int, what: str, markers: str, pattern: str) -> Sign:
    return Sign(recognised, weight, what, tuple(markers.split("|")), pattern)


LIBRARY = (
    "a library asked the driver for memory and got none",
    "a library found no room for its handle or its workspace, as mostly on a full card",
)
QUANTISED = (
    "the quantised model did not fit what is free on the cards, and bitsandbytes takes no part of it on the host"
)
UNKNOWN_DEATH = (
    "a worker of Ray died, and Ray does not know of what: host memory, an end asked for and a crash are what it can be; the worker's own "
    "log says which"
)
LARGEST = "one tensor is larger than the largest buffer of the device"
ENGINE = "an inference engine found less memory on the card than its share"
SHARED = "shared memory (/dev/shm) ran out, or a mapped file could not grow"
WATCHER = "what watches the node's memory (Ray, systemd-oomd, earlyoom, the kubelet) ended a process for it"
CONTRADICTION = "ZeRO-3 makes parameters in shards, and takes no device_map and no low_cpu_mem_usage"
SIGNS = (
    _sign("host-oom", 8, "torch could not allocate host memory", "defaultcpuallocator",
          r"DefaultCPUAllocator: (?:can't|not enough|cannot)"),
    _sign("nccl-oom", 5, "NCCL could not allocate its buffers", "cuda failure|cuda calloc",
          r"NCCL WARN.{0,80}(?:Cuda failure.{0,20}out of memory|calloc)|Cuda failure (?:2 )?'out of memory'|Failed to CUDA calloc"),
    _sign("hip-oom", 9, "torch's allocator found no room on the card", "hip out of memory|hip error|hip_error_out",
          r"HIP out of memory|HIP error: ?(?:hipError)?out ?of ?memory|HIP_ERROR_OutOfMemory"),
    _sign("cuda-oom", 9, "torch's allocator found no room on the card", "out of memory",
          r"(?:CUDA|XPU|NPU|MUSA|MPS backend|CUDA driver error:) out of memory|OutOfMemoryError: .{0,40}Tried to allocate"
          r"|Allocation on device .{0,12} would exceed allowed memory"),
    _sign("cuda-oom", 6, "torch's allocator found no room on the card, and NVML did not tell it how much there was", "nvml_success == r",
          r"NVML_SUCCESS == r INTERNAL ASSERT FAILED"),
    _sign("cuda-oom", 6, LIBRARY[0], "alloc_failed|memoryallocation|device_allocation_failed|resource allocation failed",
          r"CU(?:BLAS|DNN|SOLVER|SPARSE|FFT)_(?:STATUS_)?ALLOC_FAILED|DEVICE_ALLOCATION_FAILED|cudaErrorMemoryAllocation"
          r"|cuBLAS Error: the resource allocation failed"),
    _sign("cuda-oom", 5, "a CUDA call outside torch's allocator found no room", "out of memory",
          r"(?:CUDA|runtime|driver) error[^\n]{0,40}out of memory|error ?= ?2 : out of memory|Error out of memory at line"),
    _sign("cuda-oom", 4, "the framework found no room on the card",
          "resource_exhausted|oom when allocating|out of memory|error_out_of_memory|memory isn't enough",
          r"RESOURCE_EXHAUSTED: .{0,60}memory|OOM when allocating tensor|Out of memory (?:error on [GX]PU|allocating [\d,]{1,30} bytes)"
          r"|CUDA_ERROR_OUT_OF_MEMORY|memory isn't enough and alloc failed"),
    _sign("cuda-oom", 4, LARGEST, "invalid buffer size|memory block with size larger|maximum allowed buffer size",
          r"Error: Invalid buffer size: |can NOT allocate memory block with size larger|greater than the maximum allowed buffer size"),
    _sign("cuda-oom", 4, QUANTISED, "dispatched on the cpu",
          r"modules are dispatched on the CPU or the disk. Make sure you have enough GPU RAM"),
    _sign("cuda-oom", 4, ENGINE, "no available memory for the cache|free memory on device|mem-fraction-static|stored in kv cache",
          r"No available memory for the cache blocks|Free memory on device .{0,60}less than desired GPU memory utilization"
          r"|Not enough memory. Please try to increase --mem-fraction-static"
          r"|larger than the maximum number of tokens that can be stored in KV"),
    _sign("cuda-oom", 4, "the device's runtime found no room on the card",
          "out_of_device_memory|out of device memory|out_of_resources|pt_devmem|memory_allocation_failure|memory allocation failed"
          "|unable to allocate|command buffer",
          r"OUT_OF_DEVICE_MEMORY|Allocation is out of device memory|(?:UR_RESULT|PI)_ERROR_OUT_OF_RESOURCES|PT_DEVMEM Allocation failed"
          r"|Memory_Allocation_Failure\(EL0004\)|Device memory allocation failed|\[malloc(?:_or_wait)?\] Unable to allocate \d"
          r"|Command buffer execution failed: Insufficient Memory"),
    _sign("cuda-oom", 3, LIBRARY[1], "cublascreate|valid cudnn algorithm",
          r"CUBLAS_STATUS_NOT_INITIALIZED when calling `?cublasCreate|Unable to find a valid cuDNN algorithm"),
    _sign("cuda-oom", 4, "no batch size fitted", "no executable batch size|ran out of memory",
          r"No executable batch size found|ran out of memory (?:with|in|on)"),
    _sign("host-oom", 7, "the kernel killed a process for memory", "killed process|oom-kill|oom_kill|oomkilled|oom-killer",
          r"out of memory: kill(?:ed)? process|oom[-_]kill|OOMKilled|invoked oom-killer"),
    _sign("host-oom", 6, WATCHER, "running low on memory|memory pressure|sending sig|low on resource|ray-oom-prevention",
          r"node (?:was )?running low on memory|due to memory pressure|sending SIG(?:TERM|KILL) to process \d.{0,200}badness"
          r"|low on resource: memory|ray-oom-prevention"),
    _sign("host-oom", 6, "the batch system's limit on host memory was passed",
          "memory limit|exceeded job|exceeded limit|term_memlimit|out_of_me|out of memory",
          r"exceeded (?:job|step|its|the)? ?memory limit|Exceeded (?:job|step) memory|PBS: job killed: .{0,8}mem .{1,40} exceeded limit"
          r"|\bTERM_MEMLIMIT\b|\bOUT_OF_ME(?:MORY\b|\+)|tasks? [\d,-]{1,40}: Out Of Memory"),
    _sign("host-oom", 6, "host memory could not be allocated",
          "cannot allocate memory|memoryerror|unable to allocate|bad_alloc|host_allocation_failed|paging file is too small",
          r"Cannot allocate memory|\b_?(?:Array|Arrow)?MemoryError\b|Unable to allocate .{1,40} for an array|std::bad_alloc"
          r"|INTERNAL_ERROR_HOST_ALLOCATION_FAILED|paging file is too small"),
    _sign("host-oom", 5, SHARED,
          "shared memory (shm)|signal: bus error|shared memory segment|posix_fallocate|unable to write to file|object store",
          r"insufficient shared memory \(shm\)|killed by signal: Bus error|Error while creating shared memory segment"
          r"|posix_fallocate failed|unable to write to file </torch_.{1,60}No space left|object store because it is full"),
    _sign("host-oom", 3, SHARED, "exitcode|exit code|return code|sigbus", r"exit ?code *:? *-7\b|return code = -7\b|\bSIGBUS\b"),
    _sign("host-oom", 1, UNKNOWN_DEATH, "potential root causes", r"some potential root causes\. \(1\)"),
    _sign("host-oom", 3, "a process was killed by signal 9, as the kernel does when host memory runs out",
          "exitcode|exit code|return code|killed|sigkill|signal 9",
          r"exit ?code *:? *(?:-9|137)\b|return code = (?:-9|137)\b|\bSIGKILL\b|signal 9\b|signal: Killed|(?:^"
          r"|\n)[^\n]{0,500}\bKilled *(?:$|\n|python|torchrun)"),
    _sign("nccl-oom", 3, "NCCL failed in a CUDA call", "ncclunhandledcudaerror|call to cuda function failed",
          r"ncclUnhandledCudaError(?=[\s\S]{0,400}out of memory)"),
    _sign("not-oom", 3, CONTRADICTION, "not compatible with",
          r"Zero-?3 is not compatible with (?:.{0,40}low_cpu_mem_usage|.{0,40}device_map)"),
    _sign("not-oom", 2, "a kernel asked for more shared memory than a multiprocessor has; the card's memory is not at fault",
          "out of resource", r"out of resource: shared memory"),
    _sign("not-oom", 2, "an index or a value was out of range inside a kernel", "device-side assert", r"device-side assert"),
    _sign("not-oom", 2, "a kernel read or wrote where it may not", "illegal memory access", r"illegal memory access"),
    _sign("not-oom", 2, "a collective timed out: another rank died or fell behind", "collective operation timeout|nccltimeout|timed out",
          r"Watchdog caught collective operation timeout|ncclTimeout|collective.{0,60}timed? ?out"),
    _sign("not-oom", 2, "the CUDA build has no kernels for this card", "no kernel image", r"no kernel image is available"),
    _sign("not-oom", 2, "the CUDA device could not be used", "invalid device ordinal|busy or unavailable|cuda error|cuda-capable",
          r"invalid device ordinal|busy or unavailable|unspecified launch failure|misaligned address|uncorrectable ECC"
          r"|too many resources requested for launch"),
    _sign("not-oom", 2, "the disk is full", "no space left", r"No space left on device"),
    _sign("not-oom", 2, "a process crashed with a segmentation fault", "segmentation fault|sigsegv|exitcode",
          r"Segmentation fault|exit ?code *:? *-11\b|SIGSEGV"),
    _sign("not-oom", 2, "NCCL could not talk to another rank", "ncclsystemerror|ncclremoteerror|ncclinternalerror",
          r"ncclSystemError|ncclRemoteError|ncclInternalError"),
    _sign("not-oom", 2, "a CUDA call inside NCCL failed, and not for memory", "cuda failure",
          r"Cuda failure (?:\d{1,4} )?'(?!out of memory)"),
    _sign("not-oom", 1, "a process that was started failed; its own output says of what", "calledprocesserror|childfailederror",
          r"CalledProcessError: .{0,2000}non-zero exit status|ChildFailedError"),
    _sign("not-oom", 1, "a worker process ended: of an error of its own, told elsewhere, or killed, as for host memory",
          "exited unexpectedly|terminated abruptly", r"DataLoader worker .{1,80}exited unexpectedly|process pool was terminated abruptly"),
    _sign("cuda-oom", 1, "something ran out of memory", "out of memory|outofmemory", r"out of memory|OutOfMemory"),
    _sign("not-oom", 1, "Python code failed", "error",
          r"(?:^|\n)[^\n]{0,80}\b(?:Type|Value|Key|Attribute|Import|ModuleNotFound|FileNotFound|Index|Assertion"
          r"|NotImplemented|Runtime)Error: "),
)  # fmt: skip


def _shortest(markers: set[bytes]) -> tuple[bytes, ...]:
    """Without those that contain another."""
    return tuple(sorted(one for one in markers if not any(other in one for other in markers - {one})))


MARKERS = _shortest({marker.encode() for sign in SIGNS for marker in sign.markers if marker != "error"})
"""What a scan of a long log looks for. "error" alone says too little there: a short text is looked at as a whole (``sign_of``)."""


def sign_of(text: str) -> Sign | None:
    """The first sign that a line knows, or None."""
    lower = text.lower()
    return next((sign for sign in SIGNS if sign.knows(text, lower)), None)
