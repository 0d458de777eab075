"""The GPUs that a plan knows: memory, dense bf16 peak and bandwidth.

Peaks are the vendors' dense figures (the L40S' 733 TFLOP/s are for sparse matrices). `memory_gib` is
what PyTorch reports as the device's total capacity, less than the number on the box. Free of torch.
"""

from dataclasses import dataclass

from model.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One kind of GPU."""

    name: str
    """As on the command line, where the plan takes it."""
    device_names: tuple[str, ...]
    """Parts of the name that the driver gives it; the first kind that matches counts."""
    memory_gib: float
    """Total capacity."""
    peak_flops: float
    """Dense bf16 FLOP/s with fp32 accumulation."""
    bandwidth_bytes_per_s: float
    """Of its memory."""


GPUS = (
    Gpu(name="l40s", device_names=("L40S",), memory_gib=44.39, peak_flops=362.05e12, bandwidth_bytes_per_s=864e9),
    Gpu(
        name="a100-40",
        device_names=("A100-PCIE-40GB", "A100-SXM4-40GB"),
        memory_gib=39.39,
        peak_flops=312e12,
        bandwidth_bytes_per_s=1.555e12,
    ),
    Gpu(name="a100-80", device_names=("A100",), memory_gib=79.14, peak_flops=312e12, bandwidth_bytes_per_s=2.0e12),
    Gpu(name="h100", device_names=("H100",), memory_gib=79.10, peak_flops=989e12, bandwidth_bytes_per_s=3.35e12),
    Gpu(name="h200", device_names=("H200",), memory_gib=139.8, peak_flops=989e12, bandwidth_bytes_per_s=4.8e12),
    Gpu(name="4090", device_names=("4090",), memory_gib=23.64, peak_flops=165.2e12, bandwidth_bytes_per_s=1.01e12),
)
"""What a plan can be made for."""
VARIANTS = (
    Gpu(name="h100-pcie", device_names=("H100 PCIe",), memory_gib=79.10, peak_flops=756e12, bandwidth_bytes_per_s=2e12),
    Gpu(name="h100-nvl", device_names=("H100 NVL",), memory_gib=93.0, peak_flops=835e12, bandwidth_bytes_per_s=3.9e12),
    Gpu(name="h200-nvl", device_names=("H200 NVL",), memory_gib=139.8, peak_flops=835e12, bandwidth_bytes_per_s=4.8e12),
)
"""Cards with the name of one of those that compute less, by NVIDIA's data sheets; known by their device name alone."""
SLOWER = ("MIG", "Laptop", "4090 D")
"""Parts of the names of devices that compute less than their kind, each differently: rather not known than wrong."""


def gpu_named(name: str) -> Gpu:
    """The GPU of a command-line name.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    found = next((gpu for gpu in GPUS if gpu.name == name.lower()), None)
    if found is None:
        raise ConfigError(f"--gpu {name}: not known. Valid: {', '.join(gpu.name for gpu in GPUS)}.")
    return found


def gpu_of_device(device_name: str) -> Gpu | None:
    """The GPU of a driver's device name ("NVIDIA L40S"); None if it is not known."""
    if any(part in device_name for part in SLOWER):
        return None
    return next((gpu for gpu in (*VARIANTS, *GPUS) if any(part in device_name for part in gpu.device_names)), None)
