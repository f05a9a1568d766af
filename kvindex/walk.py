"""From runs of masks to each stream's reusable prefix on the three tiers (decision D12), all streams at once.

A mask has three bits a stream slot: bit 3*slot + tier. A *set* of streams is an int with bit 3*slot set for each
member, so `set & mask`, `set & mask >> 1`, `set & mask >> 2` are its members that have the block on device, host, disk.

    interleaved   go on while the block is on any tier; each block counts for its highest tier
    cascade       device blocks from 0; host goes on from there; disk goes on from there; never climbs back

Streams in the same situation are carried as one set, so the cost follows the number of different situations, not the
number of streams: usually one set (everything on the device so far) and a few that left it.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple


class Walk(StrEnum):
    """How a stream's prefix may change tiers (D12)."""

    INTERLEAVED = "interleaved"
    CASCADE = "cascade"


class TierBlocks(NamedTuple):
    """Blocks per tier. As a match: exclusive blocks of one contiguous reusable prefix, each block counted once."""

    device: int
    host: int
    disk: int


def credit(runs: Iterable[tuple[int, int]], interleaved: int, cascade: int, blind: int) -> list[tuple[int, TierBlocks]]:
    """(set of streams, their blocks), for every stream of the two sets with at least one block; sets are disjoint.

    runs    (mask, length) in order; consumed only as far as any stream still matches
    blind   mask bits that count as not set
    O(runs * situations) big-int operations.
    """
    done: list[tuple[int, TierBlocks]] = []
    on_device = interleaved | cascade
    mixed: list[tuple[int, int, int, int]] = []  # interleaved, left the all-device stretch: set, device, host, disk
    on_host: list[tuple[int, int]] = []  # cascade, counting host: set, device
    on_disk: list[tuple[int, int, int]] = []  # cascade, counting disk: set, device, host
    position = 0
    for mask, length in runs:
        if blind:
            mask &= ~blind
        if on_disk:
            moving, on_disk = on_disk, []
            for members, device, host in moving:
                stay = members & mask >> 2
                if stay:
                    on_disk.append((stay, device, host))
                if stay != members:
                    done.append((members ^ stay, TierBlocks(device, host, position - device - host)))
        if on_host:
            waiting, on_host = on_host, []
            for members, device in waiting:
                stay = members & mask >> 1
                if stay:
                    on_host.append((stay, device))
                if stay != members:
                    members ^= stay
                    host = position - device
                    down = members & mask >> 2
                    if down:
                        on_disk.append((down, device, host))
                    if down != members:
                        done.append((members ^ down, TierBlocks(device, host, 0)))
        if mixed:
            crowd, mixed = mixed, []
            for members, device, host, disk in crowd:
                _spread(mixed, done, members, mask, length, device, host, disk)
        stay = on_device & mask
        if stay != on_device:
            members = on_device ^ stay
            on_device = stay
            if members & interleaved:
                _spread(mixed, done, members & interleaved, mask, length, position, 0, 0)
            members &= cascade
            if members:
                down = members & mask >> 1
                if down:
                    on_host.append((down, position))
                    members ^= down
                down = members & mask >> 2
                if down:
                    on_disk.append((down, position, 0))
                    members ^= down
                if members and position:
                    done.append((members, TierBlocks(position, 0, 0)))
        position += length
        if not (on_device or mixed or on_host or on_disk):
            return done
    if on_device and position:
        done.append((on_device, TierBlocks(position, 0, 0)))
    done.extend((members, TierBlocks(device, position - device, 0)) for members, device in on_host)
    done.extend((members, TierBlocks(device, host, position - device - host)) for members, device, host in on_disk)
    done.extend((members, TierBlocks(device, host, disk)) for members, device, host, disk in mixed)
    return done


def _spread(
    mixed: list[tuple[int, int, int, int]],
    done: list[tuple[int, TierBlocks]],
    members: int,
    mask: int,
    length: int,
    device: int,
    host: int,
    disk: int,
) -> None:
    """One run of the interleaved walk for streams in one situation: split them by the run's highest tier."""
    part = members & mask
    if part:
        mixed.append((part, device + length, host, disk))
        members ^= part
    part = members & mask >> 1
    if part:
        mixed.append((part, device, host + length, disk))
        members ^= part
    part = members & mask >> 2
    if part:
        mixed.append((part, device, host, disk + length))
        members ^= part
    if members and device + host + disk:
        done.append((members, TierBlocks(device, host, disk)))
