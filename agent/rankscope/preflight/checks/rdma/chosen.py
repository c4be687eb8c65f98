"""Which ports NCCL will use: those that NCCL_IB_HCA names, of active ones all."""

from __future__ import annotations

from rankscope.preflight.facts.rdma import RdmaFacts, RdmaPort


def chosen(facts: RdmaFacts) -> tuple[RdmaPort, ...]:
    """Return the ports that NCCL_IB_HCA leaves.

    Its syntax (NCCL's documentation): a list of prefixes, "mlx5_0:1" with a port; "=" before it
    asks for exact names, "^" leaves out what is named.
    """
    text = facts.hca_filter
    is_left_out, text = text.startswith("^"), text.removeprefix("^")
    is_exact, text = text.startswith("="), text.removeprefix("=")
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        return facts.ports
    return tuple(
        port
        for port in facts.ports
        if any(_fits(port, name, is_exact) for name in names) != is_left_out
    )


def _fits(port: RdmaPort, name: str, is_exact: bool) -> bool:
    device, _, number = name.partition(":")
    if number and number != str(port.number):
        return False
    return port.device == device if is_exact else port.device.startswith(device)
