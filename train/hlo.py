"""Reads an optimised HLO module: how often each computation runs, what its collectives move, what its products cost.

XLA's own cost analysis counts the body of a loop once, so a step that scans over layers looks as cheap as one layer.
Here loops are multiplied by their trip counts, read from `known_trip_count` or, where the compiler does not print it
(TPU), from the loop's condition `counter < bound` with a constant start (JAX's scans and counted loops step by one).
Loops that show neither count once and are reported.
"""

import collections
import dataclasses
import re
from collections.abc import Iterator

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|called_computations)=\{?%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of HLO: `%name = shape opcode(operands), attributes`."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    literal: str
    root: bool


@dataclasses.dataclass(frozen=True)
class Counts:
    """What one run of the module costs one device.

    Attributes:
        collective_bytes: bytes of the larger side of every collective, by kind. A ring moves (p - 1) / p of them over
            each link, and twice that for an all-reduce.
        product_flops: multiplications and additions of matrix products and convolutions, loops multiplied.
        product_flops_once: the same with each loop body counted once, as XLA counts.
        unknown_loops: loops whose trip count the text does not show, counted once.
    """

    collective_bytes: dict[str, int]
    product_flops: float
    product_flops_once: float
    unknown_loops: tuple[str, ...]


def _matching(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    return len(text)


def _instruction(line: str) -> Instruction | None:
    head = re.match(r"\s*(ROOT )?%?([\w.\-]+) = ", line)
    if head is None:
        return None
    rest = line[head.end() :]
    end = _matching(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opening = rest.find("(")
    if opening < 0:
        return None
    closing = _matching(rest, opening)
    inside = rest[opening + 1 : closing]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(head[2], shape, rest[:opening], operands, rest[closing + 1 :], inside, bool(head[1]))


def parse(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """Computations by name, each a dict of instructions by name, and the name of the entry computation."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line)
        if head is not None and not line.startswith(" "):
            current = computations.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif current is not None and (instruction := _instruction(line)) is not None:
            current[instruction.name] = instruction
    return computations, entry


def _dims(dims: str) -> list[int]:
    return [int(d) for d in dims.split(",") if d]


def _product(numbers: list[int]) -> int:
    total = 1
    for number in numbers:
        total *= number
    return total


def shape_bytes(shape: str) -> int:
    """Bytes of an HLO shape, tuples summed, layouts and padding ignored."""
    total = 0
    for dtype, dims in _ARRAY.findall(shape):
        width = re.match(r"[a-z]+(\d+)", dtype)
        bits = _BITS.get(dtype, int(width[1]) if width else 0)
        total += (_product(_dims(dims)) * bits + 7) // 8
    return total


def _payload(instruction: Instruction, body: dict[str, Instruction], kind: str) -> int:
    given = sum(shape_bytes(body[name].shape) for name in instruction.operands if name in body)
    made = shape_bytes(instruction.shape)
    if kind == "all-gather":
        # the start of an asynchronous gather returns (operand, result)
        return made - given if instruction.opcode.endswith("-start") else made
    return given


def _product_flops(instruction: Instruction, body: dict[str, Instruction]) -> float:
    """2 * outputs * terms a product; 0 for anything but dot and convolution."""
    if instruction.opcode not in ("dot", "convolution") or len(instruction.operands) < 2:
        return 0.0
    outputs = _product(_dims(_ARRAY.findall(instruction.shape)[0][1]))
    sides = [_ARRAY.findall(body[name].shape) for name in instruction.operands[:2] if name in body]
    if len(sides) < 2 or not all(sides):
        return 0.0
    left, right = (_dims(side[0][1]) for side in sides)
    if instruction.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        terms = _product([left[d] for d in _dims(contracted[1])]) if contracted else 1
    else:
        labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.attributes)
        terms = _product([size for size, label in zip(right, labels[1] if labels else "") if label != "o"])
    return 2.0 * outputs * terms


def _root(body: dict[str, Instruction]) -> Instruction | None:
    return next((i for i in body.values() if i.root), None)


def _constant(name: str, body: dict[str, Instruction]) -> int | None:
    """The integer that `name` holds, through copies."""
    for _ in range(8):
        instruction = body.get(name)
        if instruction is None:
            return None
        if instruction.opcode == "constant":
            return int(instruction.literal) if re.fullmatch(r"-?\d+", instruction.literal) else None
        if instruction.opcode not in ("copy", "bitcast", "convert") or not instruction.operands:
            return None
        name = instruction.operands[0]
    return None


def trip_count(loop: Instruction, body: dict[str, Instruction], computations: dict) -> int | None:
    """How often a `while` runs, None where the text does not show it."""
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", loop.attributes)
    test = computations.get(condition[1], {}) if condition else {}
    root = _root(test)
    start = body.get(loop.operands[0]) if loop.operands else None
    if root is None or root.opcode != "compare" or start is None or start.opcode != "tuple":
        return None
    direction = re.search(r"direction=(\w+)", root.attributes)

    def value(name: str) -> tuple[int | None, bool]:
        """(number at entry, whether it is carried)"""
        if (number := _constant(name, test)) is not None:
            return number, False
        element = test.get(name)
        index = re.search(r"index=(\d+)", element.attributes) if element else None
        if index is None or int(index[1]) >= len(start.operands):
            return None, True
        return _constant(start.operands[int(index[1])], body), True

    (first, carried), (bound, _) = value(root.operands[0]), value(root.operands[1])
    if first is None or bound is None or not carried or direction is None or direction[1] not in ("LT", "LE"):
        return None
    return max(0, bound - first + (direction[1] == "LE"))


def count(text: str) -> Counts:
    """Collectives and products of an optimised module (`compiled.as_text()`), for one device.

    The start and the end of an asynchronous collective, and the pieces that TPU fusions cut one into, share a channel
    and count once. An all-reduce fused with the slice after it counts as the reduce-scatter that it is. Every branch
    of a conditional counts.
    """
    computations, entry = parse(text)
    moved: collections.Counter[str] = collections.Counter()
    unknown: list[str] = []
    flops = flops_once = 0.0

    def called(instruction: Instruction) -> Iterator[str]:
        if instruction.opcode.endswith(("-done", "-update")):
            return
        if instruction.opcode in ("fusion", "call", "custom-call", "async-start") and (
            match := _CALLED.search(instruction.attributes)
        ):
            yield match[1]
        if instruction.opcode == "conditional":
            for many, one in _BRANCHES.findall(instruction.attributes):
                yield from re.findall(r"[\w.\-]+", many) if many else [one]

    def walk(name: str, times: int, seen: set) -> None:
        nonlocal flops, flops_once
        body = computations.get(name, {})
        for instruction in body.values():
            work = _product_flops(instruction, body)
            flops, flops_once = flops + times * work, flops_once + work
            kind = instruction.opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                channel = re.search(r"channel_id=(\d+)", instruction.attributes)
                mark = (kind, channel[1] if channel else (name, instruction.name))
                if mark not in seen:
                    seen.add(mark)
                    scatter = kind == "all-reduce" and name.startswith("all-reduce-scatter")
                    moved["reduce-scatter" if scatter else kind] += times * _payload(instruction, body, kind)
            elif instruction.opcode == "while":
                trips = trip_count(instruction, body, computations)
                if trips is None:
                    unknown.append(instruction.name)
                inner = re.search(r"body=%?([\w.\-]+)", instruction.attributes)
                if inner:
                    walk(inner[1], times * (1 if trips is None else trips), set())
            for callee in called(instruction):
                walk(callee, times, seen)

    walk(entry, 1, set())
    return Counts(dict(moved), flops, flops_once, tuple(unknown))
