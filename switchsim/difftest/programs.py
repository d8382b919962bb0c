"""Random programs in BMv2's JSON format, for testing engines against each other.

A program is made from a random generator alone. It looks like what p4c emits for v1model, with
constructs in combinations that nobody would write. Must not know the engines: a program that one of
them refuses is for the caller to leave out.
"""

from __future__ import annotations

import random
from typing import Any, TypeAlias

from kvcast.switchsim.loader import INTRINSIC

Json: TypeAlias = Any

_STANDARD = (
    ("ingress_port", 9),
    ("egress_spec", 9),
    ("egress_port", 9),
    ("instance_type", 32),
    ("packet_length", 32),
    ("enq_timestamp", 32),
    ("enq_qdepth", 19),
    ("deq_timedelta", 32),
    ("deq_qdepth", 19),
    ("ingress_global_timestamp", 48),
    ("egress_global_timestamp", 48),
    ("mcast_grp", 16),
    ("egress_rid", 16),
    ("checksum_error", 1),
    ("parser_error", 32),
    ("priority", 3),
    ("_padding", 3),
)
_ALIASES = [
    [alias, ["standard_metadata", field]]
    for alias, header, field in ((name, *name.split(".")) for name in INTRINSIC)
    if header != "standard_metadata" and field in dict(_STANDARD)
]
_WIDTHS = (
    1, 2, 3, 4, 7, 8, 9, 12, 13, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 100, 128, 130, 200,
)  # fmt: skip
_ALGORITHMS = (
    "crc16", "crc32", "csum16", "identity", "xor16", "xxh64", "crcCCITT", "hash_ex", "crc8_custom",
    "crc64_custom", "xor32", "round_robin",
)  # fmt: skip
_ERRORS = (
    "NoError", "PacketTooShort", "NoMatch", "StackOutOfBounds", "HeaderTooShort", "ParserTimeout",
    "ParserInvalidArgument", "Custom",
)  # fmt: skip


def of_type(name: str, value: Json) -> Json:
    return {"type": name, "value": value}


def hexstr(value: int) -> Json:
    return of_type("hexstr", hex(value))


def generate(rng: random.Random) -> dict[str, Json]:
    """A program, as the object that its JSON file holds."""
    return _Generator(rng).program()


class _Generator:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.types: dict[str, list[list[Json]]] = {}
        self.max_length: dict[str, int] = {}
        self.headers: list[tuple[str, str, bool]] = []
        self.stacks: list[tuple[str, str, list[str]]] = []
        self.unions: dict[str, list[str]] = {}
        """Members of each."""
        self.union_stack: list[str] = []
        self.parameters: list[int] = []
        """Widths of the parameters of the action that is being made."""
        self.actions: list[dict[str, Json]] = []
        self.egress = False

    # --- header space -----------------------------------------------------------------------

    def header_space(self) -> None:
        rng = self.rng
        self.types["standard_metadata"] = [[n, w, False] for n, w in _STANDARD]
        self.headers.append(("standard_metadata", "standard_metadata", True))
        fields: list[list[Json]] = []
        for n in range(rng.randrange(4, 12)):
            width = rng.choice(_WIDTHS)
            fields.append([f"m{n}", width, width > 1 and rng.random() < 0.25])
        fields.append(["group", 16, False])
        fields.append(["port", 9, False])
        self.types["scalars_t"] = fields
        self.headers.append(("scalars", "scalars_t", True))
        for n in range(rng.randrange(2, 5)):
            self.header_type(f"h{n}_t", varbit=rng.random() < 0.25)
            self.headers.append((f"h{n}", f"h{n}_t", False))
        # A second instance of the first type, to copy to and compare with.
        self.headers.append(("twin", "h0_t", False))
        if rng.random() < 0.6:
            self.header_type("e_t", varbit=False)
            names = [f"stack[{n}]" for n in range(rng.randrange(2, 5))]
            self.headers += [(name, "e_t", False) for name in names]
            self.stacks.append(("stack", "e_t", names))
            if rng.random() < 0.4:
                names = [f"other[{n}]" for n in range(len(names))]
                self.headers += [(name, "e_t", False) for name in names]
                self.stacks.append(("other", "e_t", names))
        if rng.random() < 0.4:
            for n in range(2):
                self.header_type(f"u{n}_t", varbit=False)
            unions = ["u", "v"] if rng.random() < 0.5 else ["u"]
            if rng.random() < 0.5:
                self.union_stack = [f"us[{n}]" for n in range(rng.randrange(2, 4))]
            for union in [*unions, *self.union_stack]:
                members = [f"{union}.u{n}" for n in range(2)]
                self.headers += [(m, f"u{n}_t", False) for n, m in enumerate(members)]
                self.unions[union] = members

    def header_type(self, name: str, *, varbit: bool) -> None:
        rng = self.rng
        fields: list[list[Json]] = []
        bits = 0
        for n in range(rng.randrange(1, 6)):
            width = rng.choice(_WIDTHS)
            fields.append([f"f{n}", width, width > 1 and rng.random() < 0.15])
            bits += width
        if bits % 8:
            fields.append(["fill", 8 - bits % 8, False])
            bits += 8 - bits % 8
        if rng.random() < 0.05:
            fields.append(["wide", 2048, False])
            bits += 2048
        if varbit:
            fields.append(["vb", "*", False])
            self.max_length[name] = bits // 8 + rng.choice((4, 10, 40))
        self.types[name] = fields

    def type_of(self, header: str) -> str:
        return next(t for n, t, _ in self.headers if n == header)

    def fields_of(self, header: str) -> list[tuple[str, int, bool]]:
        """Without a variable-length field."""
        return [(f[0], f[1], f[2]) for f in self.types[self.type_of(header)] if f[1] != "*"]

    def packet_headers(self) -> list[str]:
        return [n for n, _, metadata in self.headers if not metadata]

    # --- expressions ------------------------------------------------------------------------

    def any_field(self) -> tuple[str, str]:
        rng = self.rng
        if rng.random() < 0.5:
            header = "scalars"
        elif rng.random() < 0.2:
            header = "standard_metadata"
        else:
            header = rng.choice(self.packet_headers())
        return header, rng.choice(self.fields_of(header))[0]

    def target(self) -> tuple[str, str]:
        rng = self.rng
        if rng.random() < 0.15:
            names = ["mcast_grp"] if self.rng.random() < 0.4 else ["egress_spec"]
            if rng.random() < 0.03:
                names = ["priority"]
            return "standard_metadata", rng.choice(names)
        header = "scalars" if rng.random() < 0.5 else rng.choice(self.packet_headers())
        return header, rng.choice(self.fields_of(header))[0]

    def constant(self) -> int:
        rng = self.rng
        roll = rng.random()
        if roll < 0.5:
            return rng.randrange(9)
        value = rng.getrandbits(rng.choice((8, 9, 16, 32, 48, 64, 128)))
        return value if roll < 0.95 else -value

    def data(self, depth: int = 3) -> Json:
        """An expression that is a number."""
        rng = self.rng
        roll = rng.random()
        if depth <= 0 or roll < 0.3:
            return self.leaf()
        if roll < 0.75:
            return self.masked(depth)
        if roll < 0.85:
            return self.op("b2d", None, self.boolean(depth - 1))
        if roll < 0.93:
            value = self.op("?", self.data(depth - 1), self.data(depth - 1))
            value["value"]["cond"] = self.boolean(depth - 1)
            return value
        return self.op(
            rng.choice(("sat_cast", "usat_cast", "two_comp_mod")),
            self.data(depth - 1),
            hexstr(rng.randrange(1, 70)),
        )

    def masked(self, depth: int) -> Json:
        """Arithmetic, mostly cut as p4c cuts it."""
        rng = self.rng
        op = rng.choice(("+", "-", "*", "&", "|", "^", "~", ">>", "<<", "/", "%", "+", "-"))
        left = self.data(depth - 1)
        if op == "~":
            value = self.op("~", None, left)
        elif op in ("<<", ">>"):
            amount = hexstr(rng.randrange(70))
            if rng.random() < 0.4:
                amount = self.op("&", self.data(depth - 2), hexstr(rng.choice((7, 31, 63, 127))))
            value = self.op(op, left, amount)
        else:
            value = self.op(op, left, self.data(depth - 1))
        if rng.random() < 0.8:
            width = rng.choice(_WIDTHS)
            value = self.op("&", value, hexstr((1 << width) - 1))
        return value

    @staticmethod
    def op(op: str, left: Json, right: Json) -> Json:
        return of_type("expression", {"op": op, "left": left, "right": right})

    def leaf(self) -> Json:
        rng = self.rng
        roll = rng.random()
        if roll < 0.3:
            return hexstr(self.constant())
        if roll < 0.5 and self.parameters:
            return of_type("local", rng.randrange(len(self.parameters)))
        if self.stacks and roll < 0.58:
            name, type_, _ = rng.choice(self.stacks)
            number = rng.randrange(len([f for f in self.types[type_] if f[1] != "*"]))
            return self.op("access_field", self.element(name), number)
        if self.stacks and roll < 0.62:
            name = rng.choice(self.stacks)[0]
            stack = of_type("header_stack", name)
            return self.op(rng.choice(("last_stack_index", "size_stack")), None, stack)
        if self.stacks and roll < 0.66:
            name, type_, _ = rng.choice(self.stacks)
            return of_type("stack_field", [name, rng.choice(self.types[type_])[0]])
        return of_type("field", list(self.any_field()))

    def element(self, stack: str) -> Json:
        """stack[an index that is often one]"""
        index = hexstr(self.rng.randrange(4))
        if self.rng.random() < 0.6:
            field = of_type("field", list(self.any_field()))
            index = self.op("&", field, hexstr(self.rng.choice((1, 3))))
        left = of_type("header_stack", stack)
        return self.op("dereference_header_stack", left, index)

    def a_union(self) -> Json:
        rng = self.rng
        if not self.union_stack or rng.random() < 0.5:
            plain = [u for u in self.unions if u not in self.union_stack]
            return of_type("header_union", rng.choice(plain))
        field = of_type("field", list(self.any_field()))
        index = self.op("&", field, hexstr(3)) if rng.random() < 0.5 else hexstr(rng.randrange(4))
        left = of_type("header_union_stack", "us")
        return self.op("dereference_union_stack", left, index)

    def header(self) -> Json:
        if self.unions and self.rng.random() < 0.15:
            return self.op("access_union_header", self.a_union(), self.rng.randrange(2))
        if self.stacks and self.rng.random() < 0.25:
            return self.element(self.rng.choice(self.stacks)[0])
        return of_type("header", self.rng.choice(self.packet_headers()))

    def boolean(self, depth: int = 2) -> Json:
        rng = self.rng
        roll = rng.random()
        if depth <= 0 or roll < 0.5:
            op = rng.choice(("==", "!=", "<", ">", "<=", ">="))
            return self.op(op, self.data(min(depth, 1)), self.data(min(depth, 1)))
        if roll < 0.6:
            return self.op("valid", None, self.header())
        if roll < 0.65:
            return self.op("d2b", None, self.data(depth - 1))
        if roll < 0.72:
            return self.op("not", None, self.boolean(depth - 1))
        if roll < 0.78:
            first = of_type("header", "h0")
            return self.op(
                rng.choice(("==", "!=")), first, of_type("header", rng.choice(("twin", "h1")))
            )
        if roll < 0.8:
            return of_type("bool", rng.random() < 0.5)
        if roll < 0.85 and self.unions:
            if rng.random() < 0.4:
                return self.op(rng.choice(("==", "!=")), self.a_union(), self.a_union())
            return self.op("valid_union", None, self.a_union())
        return self.op(rng.choice(("and", "or")), self.boolean(depth - 1), self.boolean(depth - 1))

    # --- statements -------------------------------------------------------------------------

    def register(self) -> Json:
        return of_type("register_array", self.rng.choice(self.registers)[0])

    def statement(self) -> Json:
        rng = self.rng
        field = of_type("field", list(self.target()))
        choices = ["assign"] * 12 + [
            "add_header", "add_header", "remove_header", "assign_header", "register_read",
            "register_read", "register_write", "register_write", "count", "meter", "hash", "clone",
            "drop", "digest", "recirculate", "resubmit", "truncate", "random", "group", "port",
            "port", "exit", "assert", "element", "element", "array", "array", "array", "varbit",
            "union", "stacks",
        ]  # fmt: skip
        kind = rng.choice(choices)
        if kind in ("clone", "exit", "assert") and rng.random() < 0.7:
            kind = "port"
        # What loops for ever stops only at the bound, after thousands of passes.
        if kind in ("recirculate", "resubmit") and rng.random() < 0.97:
            kind = "port"
        if kind == "clone" and self.egress and rng.random() < 0.8:
            kind = "port"
        index = self.data(1)
        if rng.random() < 0.8:
            index = self.op("&", index, hexstr(7))
        match kind:
            case "add_header" | "remove_header":
                return self.call(kind, self.header())
            case "assign_header":
                to, from_ = rng.choice((("h0", "twin"), ("twin", "h0")))
                return self.call(kind, of_type("header", to), of_type("header", from_))
            case "register_read":
                return self.call(kind, field, self.register(), index)
            case "register_write":
                return self.call(kind, self.register(), index, self.data())
            case "count":
                return self.call(kind, of_type("counter_array", "counts"), index)
            case "meter":
                meter = of_type("meter_array", rng.choice(("bytes", "packets")))
                return self.call("execute_meter", meter, index, field)
            case "hash":
                calculation = of_type("calculation", rng.choice(self.calculations))
                size = hexstr(rng.choice((0, 1, 7, 16, 1 << 32, 1 << 64)))
                return self.call(
                    "modify_field_with_hash_based_offset",
                    field,
                    hexstr(rng.randrange(5)),
                    calculation,
                    size,
                )
            case "clone":
                gress = "egress" if self.egress else "ingress"
                session = hexstr(rng.randrange(6))
                return self.call(f"clone_{gress}_pkt_to_egress", session, hexstr(rng.randrange(3)))
            case "drop":
                return self.call("mark_to_drop", of_type("header", "standard_metadata"))
            case "digest":
                return self.call("generate_digest", hexstr(0), hexstr(rng.choice((0, 1, 1, 2))))
            case "recirculate" | "resubmit" if (kind == "recirculate") == self.egress:
                return self.call(kind, hexstr(rng.randrange(3)))
            case "truncate":
                return self.call(kind, hexstr(rng.choice((0, 10, 60, 200))))
            case "random":
                return self.call(
                    "modify_field_rng_uniform", field, hexstr(rng.randrange(9)), self.data(1)
                )
            case "group" if not self.egress:
                group = of_type("field", ["standard_metadata", "mcast_grp"])
                return self.call("assign", group, hexstr(rng.randrange(6)))
            case "exit":
                return self.call("exit")
            case "assert":
                return self.call("assert", self.op("!=", self.data(1), hexstr(3)))
            case "element" if self.stacks:
                array, type_, _ = rng.choice(self.stacks)
                number = rng.randrange(len(self.types[type_]))
                return self.call(
                    "assign", self.op("access_field", self.element(array), number), self.data()
                )
            case "array" if self.stacks:
                stack = of_type("header_stack", rng.choice(self.stacks)[0])
                count = hexstr(rng.randrange(4)) if rng.random() < 0.7 else self.data(1)
                return self.call(rng.choice(("push", "pop")), stack, count)
            case "varbit" if self.types["h0_t"][-1][1] == "*":
                names = rng.choice((("h0", "twin"), ("twin", "h0")))
                fields = [of_type("field", [n, "vb"]) for n in names]
                return self.call("assign_VL", *fields)
            case "union" if self.unions:
                if self.union_stack and rng.random() < 0.3:
                    unions = of_type("header_union_stack", "us")
                    if rng.random() < 0.5:
                        return self.call("assign_union_stack", unions, unions)
                    return self.call(rng.choice(("push", "pop")), unions, hexstr(rng.randrange(4)))
                return self.call("assign_union", self.a_union(), self.a_union())
            case "stacks" if len(self.stacks) == 2:
                both = [of_type("header_stack", n) for n in ("stack", "other")]
                rng.shuffle(both)
                return self.call("assign_header_stack", *both)
            case "assign":
                return self.call("assign", field, self.data())
            case _:
                spec = of_type("field", ["standard_metadata", "egress_spec"])
                return self.call("assign", spec, hexstr(rng.choice((0, 1, 2, 3, 4, 5, 511))))

    @staticmethod
    def call(op: str, *parameters: Json) -> Json:
        return {"op": op, "parameters": list(parameters)}

    def action(self, name: str, *, parameters: bool = True) -> int:
        rng = self.rng
        widths = [rng.choice((*_WIDTHS, 9, 16)) for _ in range(rng.randrange(4))]
        self.parameters = widths if parameters else []
        body = [self.statement() for _ in range(rng.randrange(6))]
        if rng.random() < 0.15 and body:
            # A jump forwards around some of it.
            at = rng.randrange(len(body))
            to = rng.randrange(at + 1, len(body) + 2)
            body.insert(at, self.call("_jump_if_zero", self.data(1), hexstr(to)))
        number = len(self.actions)
        self.actions.append(
            {
                "name": name,
                "id": number,
                "runtime_data": [
                    {"name": f"p{n}", "bitwidth": w} for n, w in enumerate(self.parameters)
                ],
                "primitives": body,
            }
        )
        self.parameters = []
        return number

    # --- parser -----------------------------------------------------------------------------

    def parser(self) -> Json:
        rng = self.rng
        names = [f"s{n}" for n in range(rng.randrange(2, 6))]
        members = [m for ms in self.unions.values() for m in ms]
        plain = [n for n in self.packet_headers() if n not in members and "[" not in n]
        states: list[Json] = []
        for number, name in enumerate(names):
            ops: list[Json] = []
            key: list[Json] = []
            widths: list[int] = []
            header = "h0" if number == 0 else rng.choice(plain)
            if self.stacks and number and rng.random() < 0.35:
                stack, type_, _ = rng.choice(self.stacks)
                ops.append(self.extract("stack", stack))
                field = rng.choice(self.types[type_])
                key.append(of_type("stack_field", [stack, field[0]]))
                widths.append(field[1])
            elif self.union_stack and number and rng.random() < 0.3:
                which = rng.randrange(2)
                value = ["us", f"u{which}"]
                ops.append({"op": "extract", "parameters": [of_type("union_stack", value)]})
                chosen = rng.choice(self.types[f"u{which}_t"])
                key.append(of_type("union_stack_field", [*value, chosen[0]]))
                widths.append(chosen[1])
            elif self.unions and number and rng.random() < 0.3:
                ops.append(self.extract("regular", rng.choice(members)))
            else:
                kind = self.types[self.type_of(header)]
                if kind[-1][1] == "*":
                    length = self.op("&", self.data(1), hexstr(rng.choice((24, 56, 8))))
                    ops.append(
                        {"op": "extract_VL", "parameters": [of_type("regular", header), length]}
                    )
                else:
                    ops.append(self.extract("regular", header))
                narrow = [f for f in self.fields_of(header) if f[1] <= 64]
                if narrow:
                    chosen = list(rng.choice(narrow))
                    key.append(of_type("field", [header, chosen[0]]))
                    widths.append(chosen[1])
            if rng.random() < 0.3:
                ops.append(self.parser_statement())
            if rng.random() < 0.3:
                width = rng.choice((1, 4, 8, 12, 16))
                key.append(of_type("lookahead", [rng.choice((0, 0, 3, 8)), width]))
                widths.append(width)
            later = [*names[number + 1 :], None]
            if self.stacks or self.union_stack:
                later.append(name)
            states.append(
                {
                    "name": name,
                    "id": number,
                    "parser_ops": ops,
                    "transition_key": key,
                    "transitions": self.transitions(widths, later),
                }
            )
        return {"name": "parser", "id": 0, "init_state": "s0", "parse_states": states}

    @staticmethod
    def extract(kind: str, name: str) -> Json:
        return {"op": "extract", "parameters": [of_type(kind, name)]}

    def parser_statement(self) -> Json:
        rng = self.rng
        field = of_type("field", ["scalars", rng.choice(self.fields_of("scalars"))[0]])
        match rng.randrange(5):
            case 0:
                ahead = of_type("lookahead", [rng.choice((0, 5)), rng.choice((3, 8, 20))])
                return {"op": "set", "parameters": [field, ahead]}
            case 1:
                return {"op": "set", "parameters": [field, self.data()]}
            case 2:
                error = hexstr(rng.randrange(len(_ERRORS)))
                return {"op": "verify", "parameters": [self.boolean(1), error]}
            case 3:
                return {"op": "advance", "parameters": [hexstr(rng.choice((0, 8, 16, 3)))]}
            case _:
                index = hexstr(rng.randrange(9))
                write = self.call("register_write", self.register(), index, self.data(1))
                return {"op": "primitive", "parameters": [write]}

    def transitions(self, widths: list[int], targets: list[str | None]) -> list[Json]:
        rng = self.rng
        size = sum((w + 7) // 8 for w in widths)
        result: list[Json] = []
        masked = rng.random() < 0.4
        for _ in range(rng.randrange(4) if widths else 0):
            value = mask = 0
            for w in widths:
                part = rng.choice((0, 1, 2, rng.getrandbits(w))) & ((1 << w) - 1)
                ones = rng.choice((0, (1 << w) - 1, rng.getrandbits(w)))
                shift = 8 * ((w + 7) // 8)
                value, mask = value << shift | part, mask << shift | ones
            text = f"0x{value:0{2 * size}x}"
            result.append(
                {
                    "type": "hexstr",
                    "value": text,
                    "mask": f"0x{mask:0{2 * size}x}" if masked else None,
                    "next_state": rng.choice(targets),
                }
            )
        result.append(
            {"type": "default", "value": None, "mask": None, "next_state": rng.choice(targets)}
        )
        return result

    # --- pipelines --------------------------------------------------------------------------

    def pipeline(self, name: str, number: int) -> Json:
        rng = self.rng
        self.egress = name == "egress"
        kinds = [rng.choice(("table", "table", "block", "if")) for _ in range(rng.randrange(2, 7))]
        names = [f"{name}.{kind}{n}" for n, kind in enumerate(kinds)]
        tables: list[Json] = []
        conditionals: list[Json] = []
        profiles: list[Json] = []
        for n, (node, kind) in enumerate(zip(names, kinds, strict=True)):
            # Mostly the next one, so that most nodes are reached.
            later: list[str | None] = [*names[n + 1 :], None]
            following = [later[0], later[0], rng.choice(later)]
            if kind == "if":
                conditionals.append(
                    {
                        "name": node,
                        "id": n,
                        "expression": self.boolean(3),
                        "true_next": rng.choice(following),
                        "false_next": rng.choice(following),
                    }
                )
            elif kind == "block":
                action = self.action(f"{node}.act", parameters=False)
                tables.append(self.keyless(node, n, action, rng.choice(following)))
            else:
                tables.append(self.table(node, n, following, profiles))
        self.egress = False
        return {
            "name": name,
            "id": number,
            "init_table": names[0],
            "tables": tables,
            "conditionals": conditionals,
            "action_profiles": profiles,
        }

    def keyless(self, node: str, number: int, action: int, following: str | None) -> Json:
        name = self.actions[action]["name"]
        return {
            "name": node,
            "id": number,
            "key": [],
            "match_type": "exact",
            "type": "simple",
            "max_size": 1024,
            "action_ids": [action],
            "actions": [name],
            "base_default_next": following,
            "next_tables": {name: following},
            "default_entry": {
                "action_id": action,
                "action_const": True,
                "action_data": [],
                "action_entry_const": True,
            },
        }

    def table(
        self, node: str, number: int, following: list[str | None], profiles: list[Json]
    ) -> Json:
        rng = self.rng
        match = rng.choice(("exact", "exact", "lpm", "ternary", "range"))
        key: list[Json] = []
        widths: list[int] = []
        for n in range(rng.randrange(1, 4)):
            kind = "exact"
            if match == "lpm" and n == 0:
                kind = "lpm"
            elif match in ("ternary", "range"):
                kind = rng.choice(("exact", "ternary", match))
            header, field = self.any_field()
            width = next(w for f, w, _ in self.fields_of(header) if f == field)
            if width > 500:
                header, field, width = "scalars", "group", 16
            mask = None
            if rng.random() < 0.1:
                mask = hex(rng.getrandbits(width))
            key.append(
                {"match_type": kind, "name": f"k{n}", "target": [header, field], "mask": mask}
            )
            widths.append(width)
        actions = [self.action(f"{node}.a{n}") for n in range(rng.randrange(1, 4))]
        names = [self.actions[a]["name"] for a in actions]
        by_hit = rng.random() < 0.3
        table: dict[str, Json] = {
            "name": node,
            "id": number,
            "key": key,
            "match_type": match,
            "type": "simple",
            "max_size": rng.choice((4, 16, 1024)),
            "with_counters": rng.random() < 0.5,
            "support_timeout": rng.random() < 0.2,
            "direct_meters": None,
            "action_ids": actions,
            "actions": names,
            "base_default_next": rng.choice(following),
            "next_tables": {"__HIT__": rng.choice(following), "__MISS__": rng.choice(following)}
            if by_hit
            else {name: rng.choice(following) for name in names},
        }
        if rng.random() < 0.2:
            meter = f"{node}.meter"
            target = ["scalars", rng.choice(self.fields_of("scalars"))[0]]
            self.direct_meters.append((meter, node, target))
            table["direct_meters"] = meter
        roll = rng.random()
        if roll < 0.2:
            profile = f"{node}.profile"
            selector = None
            if roll < 0.12:
                fields = [of_type("field", list(self.any_field())) for _ in range(2)]
                selector = {"algo": rng.choice(("crc16", "crc32", "identity")), "input": fields}
            table["type"] = "indirect" if selector is None else "indirect_ws"
            table["action_profile"] = profile
            profiles.append({"name": profile, "id": number, "max_size": 8, "selector": selector})
            if selector is None:
                del profiles[-1]["selector"]
            return table
        if rng.random() < 0.7:
            action = rng.choice(actions)
            table["default_entry"] = {
                "action_id": action,
                "action_const": rng.random() < 0.2,
                "action_data": self.arguments(action),
                "action_entry_const": rng.random() < 0.2,
            }
        if rng.random() < 0.3:
            table["entries"] = self.entries(key, widths, actions)
        return table

    def arguments(self, action: int) -> list[str]:
        return [
            hex(self.rng.choice((0, 1, self.rng.getrandbits(d["bitwidth"]))))
            for d in self.actions[action]["runtime_data"]
        ]

    def entries(self, key: list[Json], widths: list[int], actions: list[int]) -> list[Json]:
        rng = self.rng
        result: list[Json] = []
        seen: set[str] = set()
        for number in range(rng.randrange(8)):
            values: list[Json] = []
            for k, width in zip(key, widths, strict=True):
                full = (1 << width) - 1
                value = rng.choice((0, 1, 2, rng.getrandbits(width))) & full
                match k["match_type"]:
                    case "exact":
                        values.append({"match_type": "exact", "key": hex(value)})
                    case "lpm":
                        length = rng.randrange(width + 1)
                        value &= full & ~((1 << (width - length)) - 1)
                        values.append(
                            {"match_type": "lpm", "key": hex(value), "prefix_length": length}
                        )
                    case "ternary":
                        mask = rng.choice((0, full, rng.getrandbits(width)))
                        values.append(
                            {"match_type": "ternary", "key": hex(value & mask), "mask": hex(mask)}
                        )
                    case _:
                        end = rng.randrange(value, full + 1)
                        values.append({"match_type": "range", "start": hex(value), "end": hex(end)})
            if str(values) in seen:
                continue
            seen.add(str(values))
            action = rng.choice(actions)
            result.append(
                {
                    "match_key": values,
                    "action_entry": {"action_id": action, "action_data": self.arguments(action)},
                    "priority": rng.choice((number + 1, 1)),
                }
            )
        return result

    # --- the whole --------------------------------------------------------------------------

    def program(self) -> dict[str, Json]:
        rng = self.rng
        self.header_space()
        self.registers = [
            (f"r{n}", rng.choice((*_WIDTHS, 256, 2048))) for n in range(rng.randrange(1, 4))
        ]
        self.direct_meters: list[tuple[str, str, list[str]]] = []
        self.calculations = [f"calc{n}" for n in range(3)]
        parser = self.parser()
        pipelines = [self.pipeline("ingress", 0), self.pipeline("egress", 1)]
        ids = {name: n for n, (name, _, _) in enumerate(self.headers)}
        calculations = [self.calculation(n, name) for n, name in enumerate(self.calculations)]
        order = self.packet_headers()
        rng.shuffle(order)
        field_lists = [
            {
                "id": n,
                "name": f"list{n}",
                "elements": [
                    {
                        "type": "field",
                        "value": ["scalars", rng.choice(self.fields_of("scalars"))[0]],
                    }
                    if rng.random() < 0.8
                    else of_type("field", list(self.any_field()))
                    for _ in range(3)
                ],
            }
            for n in (1, 2)
        ]
        learn = [of_type("field", list(self.any_field())) for _ in range(rng.randrange(1, 4))]
        return {
            "program": "generated.p4",
            "__meta__": {"version": [2, 23]},
            "header_types": [
                {
                    "name": name,
                    "id": n,
                    "fields": fields,
                    **({"max_length": self.max_length[name]} if name in self.max_length else {}),
                }
                for n, (name, fields) in enumerate(self.types.items())
            ],
            "headers": [
                {"name": name, "id": ids[name], "header_type": type_, "metadata": metadata}
                for name, type_, metadata in self.headers
            ],
            "header_stacks": [
                {
                    "name": name,
                    "id": n,
                    "header_type": type_,
                    "size": len(elements),
                    "header_ids": [ids[e] for e in elements],
                }
                for n, (name, type_, elements) in enumerate(self.stacks)
            ],
            "header_union_types": [
                {"name": "u_t", "id": 0, "headers": [["u0", "u0_t"], ["u1", "u1_t"]]}
            ]
            if self.unions
            else [],
            "header_unions": [
                {
                    "name": name,
                    "id": n,
                    "union_type": "u_t",
                    "header_ids": [ids[m] for m in members],
                }
                for n, (name, members) in enumerate(self.unions.items())
            ],
            "header_union_stacks": [
                {
                    "name": "us",
                    "id": 0,
                    "union_type": "u_t",
                    "size": len(self.union_stack),
                    "header_union_ids": [list(self.unions).index(u) for u in self.union_stack],
                }
            ]
            if self.union_stack
            else [],
            "errors": [[name, n] for n, name in enumerate(_ERRORS)],
            "parsers": [parser],
            "deparsers": [{"name": "deparser", "id": 0, "order": order, "primitives": []}],
            "register_arrays": [
                {"name": name, "id": n, "size": rng.choice((4, 8, 20)), "bitwidth": width}
                for n, (name, width) in enumerate(self.registers)
            ],
            "counter_arrays": [{"name": "counts", "id": 0, "size": 8, "is_direct": False}],
            "meter_arrays": [
                {
                    "name": kind,
                    "id": n,
                    "is_direct": False,
                    "size": 8,
                    "rate_count": 2,
                    "type": kind,
                }
                for n, kind in enumerate(("bytes", "packets"))
            ]
            + [
                {
                    "name": name,
                    "id": 2 + n,
                    "is_direct": True,
                    "binding": table,
                    "rate_count": 2,
                    "type": rng.choice(("bytes", "packets")),
                    "result_target": target,
                }
                for n, (name, table, target) in enumerate(self.direct_meters)
            ],
            "calculations": calculations,
            "checksums": self.checksums(),
            "learn_lists": [{"id": 1, "name": "learn", "elements": learn}],
            "field_lists": field_lists,
            "actions": self.actions,
            "pipelines": pipelines,
            "field_aliases": _ALIASES,
        }

    def calculation(self, number: int, name: str) -> Json:
        rng = self.rng
        inputs: list[Json] = []
        for _ in range(rng.randrange(1, 5)):
            roll = rng.random()
            if roll < 0.2:
                width = rng.choice((1, 8, 12, 16))
                inputs.append({"type": "hexstr", "value": hex(3), "bitwidth": width})
            elif roll < 0.3:
                inputs.append(of_type("header", rng.choice(self.packet_headers())))
            else:
                inputs.append(of_type("field", list(self.any_field())))
        return {"name": name, "id": number, "algo": rng.choice(_ALGORITHMS), "input": inputs}

    def checksums(self) -> list[Json]:
        rng = self.rng
        result: list[Json] = []
        for n in range(rng.randrange(3)):
            header = rng.choice(self.packet_headers())
            field = rng.choice(self.fields_of(header))[0]
            verify = rng.random() < 0.5
            result.append(
                {
                    "name": f"sum{n}",
                    "id": n,
                    "type": "generic",
                    "target": [header, field],
                    "calculation": rng.choice(self.calculations),
                    "verify": verify,
                    "update": not verify,
                    "if_cond": self.boolean(1) if rng.random() < 0.5 else None,
                }
            )
        return result
