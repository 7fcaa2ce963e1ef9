"""PTX text as a list of instructions: guards, opcodes, operands and labels."""

import re
from typing import NamedTuple

from ptx.errors import UnknownInstructionError

# Debug information, and declarations of registers, which are read apart.
_DIRECTIVE = re.compile(r"^\s*\.(loc|file|section|pragma|reg)\b.*$", re.MULTILINE)
_ENTRY = re.compile(
    r"\.entry\s+(?P<name>\w+)\((?P<parameters>.*?)\)(?P<limits>[^{]*)\{(?P<body>.*?)^\}",
    re.DOTALL | re.MULTILINE,
)
_REGISTERS = re.compile(r"\.reg\s+\.(pred|b16|b32|b64)\s+(%[a-z]+)<\d+>;")
_LABEL = re.compile(r"(\$\w+):\s*")
_GUARD = re.compile(r"@(!?)(%\w+)\s+")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
_ADDRESS = re.compile(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\d+))?\s*\]")


class Address(NamedTuple):
    """A register or symbol and a number of bytes: ``[%rd1+16]``."""

    base: str
    offset: int


Operand = str | Address | tuple[str, ...]


class Guard(NamedTuple):
    """A predicate, or its negation, that says which threads execute an instruction."""

    register: str
    negated: bool


class Instruction(NamedTuple):
    """One instruction; ``text`` is for messages."""

    text: str
    guard: Guard | None
    opcode: str
    operands: tuple[Operand, ...]


class Program(NamedTuple):
    """A kernel.

    Attributes:
        parameters: their names in order.
        threads: of a block.
        registers: what the names of registers begin with, and their type.
        instructions: in order.
        labels: which instruction each stands before.
    """

    parameters: list[str]
    threads: int
    registers: dict[str, str]
    instructions: list[Instruction]
    labels: dict[str, int]


def parse(text: str) -> Program:
    """The one kernel of a PTX module.

    Raises:
        UnknownInstructionError: if there is no such kernel, or a statement is none of its kinds.
    """
    entry = _ENTRY.search(re.sub(r"//.*", "", text))
    threads = entry and re.search(r"\.reqntid\s+(\d+)\s*$", entry["limits"].strip())
    if not entry or not threads:
        raise UnknownInstructionError("no kernel of one block dimension and no cluster")
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for statement in _DIRECTIVE.sub("", entry["body"]).split(";"):
        # The braces of inline assembly stand alone; those of an operand follow a word.
        statement = statement.strip().lstrip("{}").strip()
        while label := _LABEL.match(statement):
            labels[label[1]] = len(instructions)
            statement = statement[label.end() :]
        if statement:
            instructions.append(_instruction(" ".join(statement.split())))
    parameters = re.findall(r"(\w+)\s*(?:,|$)", entry["parameters"].strip())
    registers = {prefix: kind for kind, prefix in _REGISTERS.findall(entry["body"])}
    return Program(parameters, int(threads[1]), registers, instructions, labels)


def _instruction(text: str) -> Instruction:
    guard = _GUARD.match(text)
    opcode, _, rest = text[guard.end() if guard else 0 :].partition(" ")
    if not re.fullmatch(r"[a-z]\w*(\.[\w:]+)*", opcode):
        raise UnknownInstructionError(text)
    return Instruction(
        text,
        Guard(guard[2], bool(guard[1])) if guard else None,
        opcode,
        tuple(map(_operand, _OPERAND.findall(rest))),
    )


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(text.strip("{} ").replace(",", " ").split())
    if text.startswith("["):
        address = _ADDRESS.fullmatch(text)
        if not address:
            raise UnknownInstructionError(text)
        return Address(address[1], int(address[2] or 0))
    return text
