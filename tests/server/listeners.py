"""What the processes of a node listen on, as the kernel shows it."""

import ipaddress
import os
from collections.abc import Iterator
from pathlib import Path

from shoal.loadgen.bench.process_memory import tree

_LISTENING = "0A"


def listeners(pid: int) -> dict[str, str]:
    """Return the TCP addresses that a process tree listens on, and the process of each."""
    inodes = {inode: process for process in tree(pid) for inode in _sockets(process)}
    return {
        f"{address}:{port}": Path(f"/proc/{inodes[inode]}/cmdline").read_text().split("\0")[0]
        for address, port, inode in _listening(pid)
        if inode in inodes
    }


def reachable(pid: int) -> dict[str, str]:
    """Return those of ``listeners`` that other machines could reach."""
    return {
        address: process
        for address, process in listeners(pid).items()
        if not ipaddress.ip_address(address.rpartition(":")[0]).is_loopback
    }


def _sockets(pid: int) -> Iterator[str]:
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)  # noqa: PTH208 - links whose targets are no paths
    except FileNotFoundError:
        return  # the process has ended meanwhile
    for name in names:
        try:
            target = os.readlink(f"{folder}/{name}")  # noqa: PTH115
        except FileNotFoundError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]


def _listening(pid: int) -> Iterator[tuple[str, int, str]]:
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING:
                host, _, port = fields[1].partition(":")
                yield _address(host), int(port, 16), fields[9]


def _address(text: str) -> str:
    """Return an address from the kernel's form: 32-bit words in the machine's byte order."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    found = ipaddress.ip_address(b"".join(words))
    mapped = getattr(found, "ipv4_mapped", None)
    return str(mapped or found)
