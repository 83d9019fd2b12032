"""The peak rates of devices, which the model FLOPs utilisation compares with: dense products, by datasheets."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch


class Peaks(NamedTuple):
    """TFLOP/s of one device."""

    half: float
    """bf16 and fp16, without sparsity."""
    tf32: float
    """fp32 rounded to TF32 in products; as fp32 where a device has no such thing."""
    fp32: float


_DATASHEETS: dict[str, Peaks] = {
    "H100 PCIe": Peaks(756, 378, 51),  # NVIDIA H100 datasheet
    "H100 NVL": Peaks(835, 417.5, 60),
    "H100": Peaks(989.4, 494.7, 67),  # SXM
    "H200 NVL": Peaks(835, 417.5, 60),  # NVIDIA H200 datasheet
    "H200": Peaks(989.4, 494.7, 67),  # SXM
    "GH200": Peaks(989.4, 494.7, 67),  # NVIDIA GH200 datasheet
    "GB200": Peaks(2500, 1250, 80),  # NVIDIA GB200 NVL72 datasheet, per GPU
    "B200": Peaks(2250, 1125, 75),  # NVIDIA HGX B200 datasheet, per GPU
    "A100": Peaks(312, 156, 19.5),  # NVIDIA A100 datasheet
    "L40S": Peaks(362, 183, 91.6),  # NVIDIA L40S datasheet
    "MI300X": Peaks(1307.4, 653.7, 163.4),  # AMD Instinct MI300X datasheet
    "MI325X": Peaks(1307.4, 653.7, 163.4),  # AMD Instinct MI325X datasheet
}
"""Words of a device's name -> its peaks; the first that fits counts."""


def peak_tflops(device_name: str, dtype: torch.dtype, matmul_precision: str) -> float | None:
    """The peak of a device in a dtype; None if it is not in the table.

    Args:
        matmul_precision: As ``torch.get_float32_matmul_precision()`` gives it; all but ``"highest"`` may use TF32.
    """
    peaks = next((peaks for name, peaks in _DATASHEETS.items() if re.search(rf"\b{name}\b", device_name)), None)
    if peaks is None:
        return None
    single = peaks.fp32 if matmul_precision == "highest" else peaks.tf32
    return {torch.bfloat16: peaks.half, torch.float16: peaks.half, torch.float32: single}.get(dtype)
