"""A layered drawing of a graph: boxes in ranks, edges around them. Geometry alone: no net, no library.

Ranks by the longest path, crossings lessened by barycentres, places by least squares.
Source: Sugiyama, Tagawa, Toda 1981; Brandes, Koepf 2002 for the idea of straight long edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

SWEEPS = 12
GAP, RANK_GAP = 24.0, 34.0  # pixels between boxes of a rank, and between ranks
LONG = 8.0  # the room that an edge takes where it passes a rank

Point = tuple[float, float]


@dataclass(frozen=True)
class Box:
    """What is to be drawn: its size in pixels and the boxes, by index, that its edges come from."""

    width: float
    height: float
    sources: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layout:
    """Where all lies, from (0, 0) to ``size``; y grows downwards.

    corners  of each box, upper left
    edges    a line for each source of each box, in their order: points from border to border
    """

    size: Point
    corners: list[Point]
    edges: list[list[Point]]


@dataclass
class _Spot:
    """A box, or a bend where an edge passes a rank.

    across, breadth  centre and size within the rank
    along, depth     centre and size in the direction of the ranks; room is the depth of the whole rank
    """

    rank: int
    breadth: float
    depth: float
    room: float = 0.0
    before: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    across: float = 0.0
    along: float = 0.0


def lay_out(boxes: Sequence[Box], direction: str = "TB") -> Layout:
    """Place boxes and edges; ``direction`` is TB, BT, LR or RL. Sources of a box must stand before it."""
    if direction not in ("TB", "BT", "LR", "RL"):
        raise ValueError(f"direction {direction!r} is none of TB, BT, LR, RL")
    flat = direction in ("LR", "RL")
    spots, chains = _spots(boxes, flat)
    order = _order(spots)
    _place(spots, order)
    return _turned(boxes, spots, chains, direction)


def _spots(boxes: Sequence[Box], flat: bool) -> tuple[list[_Spot], list[list[int]]]:
    """A spot for each box, and behind them the bends; each edge as the spots that it passes."""
    spots: list[_Spot] = []
    for index, box in enumerate(boxes):
        if any(not 0 <= source < index for source in box.sources):
            raise ValueError(f"box {index} comes from {box.sources}: sources must stand before it")
        rank = 1 + max((spots[source].rank for source in box.sources), default=-1)
        spots.append(_Spot(rank, *((box.height, box.width) if flat else (box.width, box.height))))
    chains = []
    for index, box in enumerate(boxes):
        for source in box.sources:
            bends = range(len(spots), len(spots) + spots[index].rank - spots[source].rank - 1)
            spots += [_Spot(spots[source].rank + 1 + i, LONG, 0.0) for i in range(len(bends))]
            chains.append([source, *bends, index])
            for a, b in zip(chains[-1], chains[-1][1:], strict=False):
                spots[a].after.append(b)
                spots[b].before.append(a)
    return spots, chains


def _order(spots: list[_Spot]) -> list[list[int]]:
    """The spots of each rank, in an order with few crossings."""
    order: list[list[int]] = [[] for _ in range(1 + max((spot.rank for spot in spots), default=-1))]
    for index, spot in enumerate(spots):
        order[spot.rank].append(index)
    place = {index: float(i) for row in order for i, index in enumerate(row)}
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for row in order if down else reversed(order):
            row.sort(
                key=lambda index: _mean(spots[index].before if down else spots[index].after, place, index)
            )
            place.update((index, float(i)) for i, index in enumerate(row))
    return order


def _mean(neighbours: list[int], place: dict[int, float], own: int) -> float:
    return sum(place[n] for n in neighbours) / len(neighbours) if neighbours else place[own]


def _place(spots: list[_Spot], order: list[list[int]]) -> None:
    """Settle ``along`` and ``across``: each spot near the mean of its neighbours, none upon another."""
    along = 0.0
    for row in order:
        depth = max(spots[index].depth for index in row)
        for index in row:
            spots[index].along, spots[index].room = along + depth / 2, depth
        along += depth + RANK_GAP
        for index, across in zip(
            row, _spread([0.0] * len(row), [spots[i].breadth for i in row]), strict=True
        ):
            spots[index].across = across
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for row in order if down else reversed(order):
            wanted = [_wanted(spots, index, down) for index in row]
            for index, across in zip(row, _spread(wanted, [spots[i].breadth for i in row]), strict=True):
                spots[index].across = across


def _wanted(spots: list[_Spot], index: int, down: bool) -> float:
    spot = spots[index]
    near = (spot.before if down else spot.after) or (spot.after if down else spot.before)
    return sum(spots[n].across for n in near) / len(near) if near else spot.across


def _spread(wanted: list[float], breadths: list[float]) -> list[float]:
    """Centres nearest to ``wanted`` in the least squares that keep the order and the gaps.

    With the gaps taken off, an increasing sequence: pools of adjacent violators.
    """
    offsets, at = [], 0.0
    for i, breadth in enumerate(breadths):
        at += (breadths[i - 1] + breadth) / 2 + GAP if i else 0.0
        offsets.append(at)
    pools: list[tuple[float, int]] = []
    for want, offset in zip(wanted, offsets, strict=True):
        mean, count = want - offset, 1
        while pools and pools[-1][0] > mean:
            other, more = pools.pop()
            mean, count = (mean * count + other * more) / (count + more), count + more
        pools.append((mean, count))
    bases = [mean for mean, count in pools for _ in range(count)]
    return [base + offset for base, offset in zip(bases, offsets, strict=True)]


def _turned(boxes: Sequence[Box], spots: list[_Spot], chains: list[list[int]], direction: str) -> Layout:
    """From across and along to x and y, all of it at or right and below of (0, 0)."""
    left = min((spot.across - spot.breadth / 2 for spot in spots), default=0.0)
    breadth = max((spot.across + spot.breadth / 2 for spot in spots), default=0.0) - left
    depth = max((spot.along + spot.depth / 2 for spot in spots), default=0.0)

    def point(across: float, along: float) -> Point:
        x, y = across - left, depth - along if direction in ("BT", "RL") else along
        return (y, x) if direction in ("LR", "RL") else (x, y)

    corners = []
    for box, spot in zip(boxes, spots, strict=False):
        x, y = point(spot.across, spot.along)
        corners.append((x - box.width / 2, y - box.height / 2))
    edges = []
    for chain in chains:  # slanting between the ranks alone: within one it would cut a neighbour
        first, last = spots[chain[0]], spots[chain[-1]]
        points = [point(first.across, first.along + first.depth / 2)]
        for a, b in zip(map(spots.__getitem__, chain), map(spots.__getitem__, chain[1:]), strict=False):
            points += [point(a.across, a.along + a.room / 2), point(b.across, b.along - b.room / 2)]
        points.append(point(last.across, last.along - last.depth / 2))
        edges.append([here for i, here in enumerate(points) if not i or here != points[i - 1]])
    return Layout(point(left + breadth, 0 if direction in ("BT", "RL") else depth), corners, edges)
