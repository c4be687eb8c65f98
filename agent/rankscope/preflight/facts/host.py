"""Which machine this is, and in what kind of box the process runs."""

from __future__ import annotations

import msgspec


class HostFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Identity of the machine and of the namespaces the process sees."""

    hostname: str
    machine_id: str = ""
    boot_id: str = ""
    network_namespace: int = 0  # inode of /proc/self/ns/net
    kernel: str = ""
    os_name: str = ""
    is_root: bool = False
    user: str = ""
    container: str = ""  # docker, podman, kubernetes, apptainer ...; empty: none seen
    is_host_network: bool | None = None
    clock_is_synchronised: bool | None = None  # adjtimex(0): STA_UNSYNC is not set
    num_cores: int = 0  # usable by this process
    firewall_tools: tuple[str, ...] = ()  # of ufw, firewalld, nft, iptables, those that are there
