"""The host's memory, and this process's part of it, as Linux tells them."""

import os
from collections.abc import Mapping
from pathlib import Path


def host_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Return the host's (total, free) bytes, within a container's limit."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    available = _mem_available(root) or os.sysconf("SC_AVPHYS_PAGES") * page
    for limit, used in _cgroup_limits(root):
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return total, available


def resident_by_cause(known: Mapping[str, int], root: Path = Path("/")) -> dict[str, int]:
    """Return this process's resident bytes: those that are `known`, and the "rest".

    Their sum is what the system tells; empty where it does not.
    """
    fields = _read(root / "proc/self/statm").split()
    if not fields:
        return {}
    resident = int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
    return {**known, "rest": max(0, resident - sum(known.values()))}


def _mem_available(root: Path) -> int | None:
    """Return MemAvailable: what Linux can free without swapping; None if unknown."""
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_limits(root: Path) -> list[tuple[int, int]]:
    """Return (limit, used) bytes of each control group of this process that has a limit."""
    base = root / "sys/fs/cgroup"
    found = []
    for line in _read(root / "proc/self/cgroup").splitlines() or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, names, top = base, ("memory.max", "memory.current", "inactive_file"), base
        elif "memory" in controllers.split(","):
            top = base / "memory"
            folder = top
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container its own group is the root; outside, parents' limits apply as well.
        folder = top / path.strip("/")
        for group in [folder, *folder.parents]:
            limit = _read_limit(group, names)
            if limit is not None:
                found.append(limit)
            if group == top:
                break
    return found


def _read_limit(group: Path, names: tuple[str, str, str]) -> tuple[int, int] | None:
    limit_name, usage_name, cache_name = names
    limit, used = _read(group / limit_name).strip(), _read(group / usage_name).strip()
    if not limit.isdecimal() or not used.isdecimal():
        return None  # no such group, or "max"
    reclaimable = 0
    for line in _read(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == cache_name:
            reclaimable = int(value)
    return int(limit), max(0, int(used) - reclaimable)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
