"""Devices, nodes and the links between them."""

from __future__ import annotations

from dataclasses import dataclass, field

# NCCL's own estimate of a hop in a ring of large messages: src/graph/tuning.cc, hwLat, "Simple".
INSIDE_LATENCY_SECONDS, BETWEEN_LATENCY_SECONDS = 3.4e-6, 14e-6
# Share of a peak that devices reach while they compute. Whole steps, with all that they wait for,
# reach 0.43 to 0.52 on A100, recomputation counted (Narayanan et al. 2021, arXiv 2104.04473,
# table 1), and 0.38 to 0.43 on H100 (Grattafiori et al. 2024, arXiv 2407.21783, table 4).
PEAK_SHARE, PEAK_SHARE_LOW, PEAK_SHARE_HIGH = 0.55, 0.45, 0.65
# What a collective reaches of a link's peak: nccl-tests on NVLink and InfiniBand (its PERFORMANCE
# notes compare bus bandwidth with the hardware's peak).
LINK_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Device:
    """What computes one rank. 0 is not known; rates are peaks, dense, without sparsity."""

    name: str
    memory_bytes: float
    peak_flops: dict[str, float] = field(default_factory=dict)  # by precision
    memory_bytes_per_second: float = 0.0
    inside_bytes_per_second: float = 0.0  # to its peers in the node, in one direction
    source: str = ""


# One row each. Peaks in FLOPs a second, dense; fp32 is TF32 where there is one, which PyTorch must
# be allowed to use.
_TABLE: tuple[tuple[str, float, dict[str, float], float, float, str], ...] = (
    ("v100", 32e9, {"fp16": 125e12, "fp32": 15.7e12}, 900e9, 150e9, "NVIDIA V100 data sheet, SXM2"),
    ("a100-40gb", 40e9, {"bf16": 312e12, "fp16": 312e12, "fp32": 156e12}, 1555e9, 300e9,
     "NVIDIA A100 data sheet, SXM"),
    ("a100", 80e9, {"bf16": 312e12, "fp16": 312e12, "fp32": 156e12}, 2039e9, 300e9,
     "NVIDIA A100 data sheet, 80 GB SXM"),
    ("h100", 80e9, {"bf16": 989e12, "fp16": 989e12, "fp32": 494e12}, 3350e9, 450e9,
     "NVIDIA H100 data sheet, SXM"),
    ("h200", 141e9, {"bf16": 989e12, "fp16": 989e12, "fp32": 494e12}, 4800e9, 450e9,
     "NVIDIA H200 data sheet, SXM"),
    ("b200", 180e9, {"bf16": 2250e12, "fp16": 2250e12, "fp32": 1100e12}, 8000e9, 900e9,
     "NVIDIA DGX B200 data sheet, an eighth"),
    ("l4", 24e9, {"bf16": 121e12, "fp16": 121e12, "fp32": 60e12}, 300e9, 32e9,
     "NVIDIA L4 data sheet; PCIe 4.0 x16"),
    ("l40s", 48e9, {"bf16": 362e12, "fp16": 362e12, "fp32": 183e12}, 864e9, 32e9,
     "NVIDIA L40S data sheet; PCIe 4.0 x16"),
    ("mi250x", 128e9, {"bf16": 383e12, "fp16": 383e12, "fp32": 95.7e12}, 3277e9, 0.0,
     "AMD MI250X data sheet, both dies; its peers are at several distances"),
    ("mi300x", 192e9, {"bf16": 1307e12, "fp16": 1307e12, "fp32": 653e12}, 5300e9, 448e9,
     "AMD MI300X data sheet"),
)  # fmt: skip
DEVICES = {row[0]: Device(*row) for row in _TABLE}


@dataclass(frozen=True, slots=True)
class Link:
    """A way between two ranks: bytes a second that one rank sends, and the time of a first byte."""

    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Equal nodes of equal devices. A link of None is not known, and so is what crosses it."""

    nodes: int
    devices: int  # of a node
    memory_bytes: float  # of a device
    flops: float = 0.0  # that a device reaches; 0: not known
    flops_low: float = 0.0  # and within which bounds
    flops_high: float = 0.0
    memory_bytes_per_second: float = 0.0  # 0: not known, the update is then not counted
    inside: Link | None = None
    between: Link | None = None  # of each device to another node
    # What the host does for a layer in a forward, and for a message inside of a cut layer: it takes
    # so long however the layer is cut, and however small the message; 0 where the host does so
    # while the device computes.
    host_layer_seconds: float = 0.0
    least_message_seconds: float = 0.0
    # Shares of a node's memory that libraries take on a device, and that stays between blocks.
    reserved_bytes: float = 1e9
    fragmentation: float = 0.05

    @property
    def ranks(self) -> int:
        """Return the number of devices."""
        return self.nodes * self.devices

    def link_of(self, members: int, stride: int) -> Link | None:
        """Return the link of a ring whose members are so many ranks apart.

        Members of one node use its inner links. Between nodes each device has a way of its own, so
        a ring with g members on each node sends over g of them, up to what the inner links carry
        (rings of NCCL, one for each adapter).
        """
        on_node = min(members, max(1, self.devices // stride))
        if on_node == members:
            return self.inside
        if self.between is None or (on_node > 1 and self.inside is None):
            return None
        if self.inside is None or on_node == 1:
            return self.between
        rate = min(self.inside.bytes_per_second, on_node * self.between.bytes_per_second)
        # of on_node hops one leaves the node
        inner, outer = self.inside.latency_seconds, self.between.latency_seconds
        return Link(rate, (inner * (on_node - 1) + outer) / on_node)

    def border(self, stride: int) -> Link | None:
        """Return the slowest link between ranks that are so far apart."""
        return self.inside if self.nodes == 1 or 2 * stride <= self.devices else self.between
