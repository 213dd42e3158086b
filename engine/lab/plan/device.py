"""Device: memory bandwidth, arithmetic and memory, as the makers' data sheets state them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.errors import ConfigError
from engine.lab.plan.numerics import Precision


@dataclass(frozen=True, slots=True)
class Device:
    """`bandwidth` in bytes/s, FLOPs per second dense (no structured sparsity), with accumulation
    in 32 bits; `fp8_flops` None: no such units. `memory` in bytes, None: not known, so that
    nothing is said about what fits. `count` devices share every matrix evenly."""

    name: str
    bandwidth: float
    bf16_flops: float
    fp8_flops: float | None
    memory: float | None
    count: int = 1

    def flops(self, precision: Precision) -> float:
        """FLOPs per second for weights in this precision. int4 weights are multiplied in bf16, and
        so are fp8 ones where the device has no fp8 units."""
        if precision.name == "fp8" and self.fp8_flops is not None:
            return self.fp8_flops
        return self.bf16_flops

    def times(self, count: int) -> Device:
        """`count` of them under tensor parallelism, communication free."""
        return replace(
            self,
            bandwidth=self.bandwidth * count,
            bf16_flops=self.bf16_flops * count,
            fp8_flops=None if self.fp8_flops is None else self.fp8_flops * count,
            memory=None if self.memory is None else self.memory * count,
            count=count,
        )


def _sheet(
    name: str, *, gb_per_s: float, bf16: float, fp8: float | None, gigabytes: float
) -> Device:
    return Device(
        name=name,
        bandwidth=gb_per_s * 1e9,
        bf16_flops=bf16 * 1e12,
        fp8_flops=None if fp8 is None else fp8 * 1e12,
        memory=gigabytes * 1e9,
    )


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _sheet("h100-sxm", gb_per_s=3350, bf16=989.4, fp8=1978.9, gigabytes=80),
        _sheet("h200", gb_per_s=4800, bf16=989.4, fp8=1978.9, gigabytes=141),
        _sheet("a100-80", gb_per_s=2039, bf16=312, fp8=None, gigabytes=80),
        _sheet("l4", gb_per_s=300, bf16=121, fp8=242, gigabytes=24),
        _sheet("l40s", gb_per_s=864, bf16=362, fp8=733, gigabytes=48),
        _sheet("rtx-4090", gb_per_s=1008, bf16=165.2, fp8=330.3, gigabytes=24),
        _sheet("rtx-3090", gb_per_s=936, bf16=71, fp8=None, gigabytes=24),
        _sheet("mi300x", gb_per_s=5300, bf16=1307.4, fp8=2614.9, gigabytes=192),
    )
}

CUSTOM = "cpu"  # any machine: the caller gives its figures


def choose_device(
    name: str, *, bandwidth: float | None, tflops: float | None, memory: float | None, count: int
) -> Device:
    """A preset with the caller's figures (GB/s, TFLOP/s, GB of one device) in place of its own.
    Raises ConfigError for an unknown name and for `cpu` without figures."""
    if name == CUSTOM:
        if bandwidth is None or tflops is None:
            raise ConfigError(
                "--device cpu is any machine and has no figures of its own: give --bandwidth in "
                "GB/s and --tflops in TFLOP/s"
            )
        device = Device(CUSTOM, bandwidth * 1e9, tflops * 1e12, None, None)
    elif name in DEVICES:
        device = DEVICES[name]
    else:
        raise ConfigError(
            f"--device {name} is not known; known are {', '.join(DEVICES)}, and {CUSTOM} with "
            "--bandwidth and --tflops"
        )
    if bandwidth is not None:
        device = replace(device, bandwidth=bandwidth * 1e9)
    if tflops is not None:
        device = replace(device, bf16_flops=tflops * 1e12, fp8_flops=None)
    if memory is not None:
        device = replace(device, memory=memory * 1e9)
    return device.times(count)
