"""Match-action pipelines to IR: each pipeline is one function, each of its nodes a block.

    i1 ingress.control(context, phv), i1 egress.control(context, phv)     true: abandon

The counterpart of `reference.tables.Table.apply` and of the loop over nodes in `reference.switch`.
Whatever decides on an action (an entry, a member of a profile, the default entry) leads to that
action's block, with the address of its arguments; an action that is short or used once is written
there, others are called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcast.native.writer import (
    FALSE,
    NULL,
    TRUE,
    Block,
    Function,
    Module,
    Value,
    i64,
    integer,
)
from kvcast.switchsim import ir
from kvcast.switchsim.llvm.actions import Actions, Toolbox
from kvcast.switchsim.llvm.hashes import SPARE_BYTES, Packer
from kvcast.switchsim.llvm.layout import (
    MEMBER_ARGUMENTS,
    REG_EXIT,
    REG_INGRESS_LENGTH,
    REG_NOW,
    STATE_BYTES,
    TO_MEMBER,
    ArgumentsLayout,
    RecordLayout,
    align,
)
from kvcast.switchsim.llvm.parser import POINTERS
from kvcast.switchsim.llvm.scope import ConstantArguments, Number, RecordArguments, Scope, Shared
from kvcast.switchsim.llvm.tables import InlineEntries, Lookup, is_inline

SHORT = 3
"""Statements of an action that is written out wherever it is used."""


@dataclass(slots=True)
class TablePlan:
    """What code and control plane know of a table alike."""

    number: int
    """Of the node."""
    spec: ir.Table
    record: RecordLayout
    actions: tuple[int, ...]
    """All actions that it can run, the default one included."""
    inline: bool
    fixed_default: bool
    """The default entry never changes."""


@dataclass(slots=True)
class ProgramPlan:
    """Layouts of a whole program."""

    program: ir.Program
    arguments: tuple[ArgumentsLayout, ...]
    tables: dict[int, TablePlan] = field(default_factory=dict)
    """By node."""
    member_bytes: list[int] = field(default_factory=list)
    """Of a record of each action profile."""

    @staticmethod
    def of(program: ir.Program) -> ProgramPlan:
        arguments = tuple(ArgumentsLayout.of(a) for a in program.actions)
        plan = ProgramPlan(program, arguments)
        for number, node in enumerate(program.nodes):
            if not isinstance(node, ir.Table):
                continue
            actions = list(dict.fromkeys(node.actions))
            if node.default is not None and node.default.action not in actions:
                actions.append(node.default.action)
            size = max([arguments[a].size for a in actions], default=0)
            fixed = node.action_profile is not None or (
                node.default is not None and node.default.const_entry
            )
            plan.tables[number] = TablePlan(
                number,
                node,
                RecordLayout.of(node, size),
                tuple(actions),
                is_inline(node),
                fixed,
            )
        for number in range(len(program.action_profiles)):
            users = [t for t in program.tables() if t.action_profile == number]
            sizes = [arguments[a].size for t in users for a in t.actions]
            plan.member_bytes.append(MEMBER_ARGUMENTS + max(sizes, default=0))
        return plan


@dataclass(slots=True)
class _Arm:
    """A way to an action: from this block, with arguments there, by an entry or by default."""

    block: Block
    arguments: Value
    hit: Value


class PipelineWriter:
    """Writes one pipeline."""

    def __init__(
        self,
        module: Module,
        shared: Shared,
        tools: Toolbox,
        plan: ProgramPlan,
        called: dict[int, Function],
    ) -> None:
        self.module = module
        self.shared = shared
        self.tools = tools
        self.plan = plan
        self.program = shared.program
        self.called = called
        """Functions of the actions that are not written out, for both pipelines."""
        nodes = self.program.nodes
        self.uses = Counter(node.action for node in nodes if isinstance(node, ir.ActionCall))
        for table in plan.tables.values():
            self.uses.update(table.actions)

    def write(self, name: str, pipeline: ir.Pipeline) -> Function:
        f = self.module.function(name, "i1", POINTERS)
        self.f = f
        self.scope = Scope(self.shared, f, f.arguments[0], f.arguments[1])
        self.abandon = f.new_block("abandon")
        self.end = f.new_block("end")
        self.actions = Actions(self.scope, self.tools, self.abandon)
        self.blocks: dict[int, Block] = {}
        self.todo: list[int] = []
        f.branch(self._block(pipeline.start))
        while self.todo:
            number = self.todo.pop()
            f.start(self.blocks[number])
            self._node(number)
        f.start(self.end)
        f.ret(FALSE)
        f.start(self.abandon)
        f.ret(TRUE)
        return f

    def _block(self, node: int | None) -> Block:
        if node is None:
            return self.end
        if node not in self.blocks:
            self.blocks[node] = self.f.new_block("node")
            self.todo.append(node)
        return self.blocks[node]

    def _node(self, number: int) -> None:
        node = self.program.nodes[number]
        match node:
            case ir.Conditional(_, condition, if_true, if_false):
                value = self.actions.expressions.boolean(condition)
                self.f.branch_if(value, self._block(if_true), self._block(if_false))
            case ir.ActionCall(_, action, following):
                self._run(action, ConstantArguments(self.plan.arguments[action], ()))
                self._after_action(action, self._block(following))
            case ir.Table():
                _TableWriter(self, self.plan.tables[number]).write()

    # --- actions ----------------------------------------------------------------------------

    def _run(self, action: int, arguments: ConstantArguments | RecordArguments) -> None:
        spec = self.program.actions[action]
        if not spec.body:
            return
        if (
            self.uses[action] == 1
            or len(spec.body) <= SHORT
            or isinstance(arguments, ConstantArguments)
        ):
            scope = self.scope.with_arguments(arguments)
            Actions(scope, self.tools, self.abandon).body(spec.body)
            return
        failed = self.f.call(self._function(action), [*self.f.arguments, arguments.pointer])
        self.f.leave_if(failed, self.abandon)

    def _function(self, action: int) -> Function:
        if action not in self.called:
            f = self.module.function(
                f"action.{action}", "i1", [*POINTERS, ("ptr readonly", "arguments")]
            )
            self.called[action] = f
            layout = self.plan.arguments[action]
            arguments = RecordArguments(layout, f.arguments[2])
            scope = Scope(self.shared, f, f.arguments[0], f.arguments[1], arguments)
            abandon = f.new_block("abandon")
            Actions(scope, self.tools, abandon).body(self.program.actions[action].body)
            f.ret(FALSE)
            f.start(abandon)
            f.ret(TRUE)
        return self.called[action]

    def _after_action(self, action: int, following: Block) -> None:
        """Go on, unless the action said `exit`."""
        f = self.f
        if not any(isinstance(s, ir.Exit) for s in self.program.actions[action].body):
            f.branch(following)
            return
        leave = f.new_block("exit")
        asked = f.compare("ne", self.scope.register(REG_EXIT), integer(32, 0))
        f.branch_if(asked, leave, following)
        f.start(leave)
        self.scope.set_register(REG_EXIT, integer(32, 0))
        f.branch(self.end)


class _TableWriter:
    """Writes the block of one table."""

    def __init__(self, pipeline: PipelineWriter, plan: TablePlan) -> None:
        self.pipeline = pipeline
        self.plan = plan
        self.spec = plan.spec
        self.f = pipeline.f
        self.scope = pipeline.scope
        self.program = pipeline.program
        self.arms: dict[int, list[_Arm]] = {a: [] for a in plan.actions}
        self.targets = {a: self.f.new_block("action") for a in plan.actions}
        self.lookup = Lookup(self.scope, plan.number, self.spec, plan.record)
        names = [self.program.actions[n].name for n in self.spec.actions]
        self.next_by_name = dict(zip(names, self.spec.next_by_action, strict=True))

    def write(self) -> None:
        spec, f = self.spec, self.f
        miss = f.new_block("miss")
        if not spec.key and spec.action_profile is None:
            f.branch(miss)
        elif self.plan.inline:
            self._inline(miss)
        else:
            record = self.lookup.find(miss)
            self._hit(record)
        f.start(miss)
        self._default()
        for action in self.plan.actions:
            self._action(action)

    # --- the ways to an action ----------------------------------------------------------------

    def _inline(self, miss: Block) -> None:
        f, spec = self.f, self.spec
        matched = [f.new_block("entry") for _ in spec.entries]
        InlineEntries(self.scope, spec, self.plan.record).dispatch(matched, miss)
        for number, (entry, block) in enumerate(zip(spec.entries, matched, strict=True)):
            f.start(block)
            self._count_hit(integer(32, number + 1))
            self._go(entry.action, entry.arguments, TRUE)

    def _hit(self, record: Value) -> None:
        f, layout = self.f, self.plan.record
        self._count_hit(f.load(32, f.at(record, layout.state), 4))
        if self.spec.action_profile is None:
            number = f.load(32, f.at(record, layout.action), 4)
            self._choose(number, f.at(record, layout.arguments), TRUE)
            return
        member = self._member(record)
        number = f.load(32, member, 4)
        self._choose(number, f.at(member, MEMBER_ARGUMENTS), TRUE)

    def _default(self) -> None:
        """Continue a miss."""
        f, spec, plan = self.f, self.spec, self.plan
        if plan.fixed_default:
            if spec.default is None:
                f.branch(self.pipeline._block(spec.next_miss))
                return
            self._go(spec.default.action, spec.default.arguments, FALSE)
            return
        index = f.acquire(32, self.scope.word(f"table.{plan.number}.default"))
        f.leave_if(f.compare("eq", index, integer(32, 0)), self.pipeline._block(spec.next_miss))
        record = self.lookup.record(index)
        number = f.load(32, f.at(record, plan.record.action), 4)
        self._choose(number, f.at(record, plan.record.arguments), FALSE)

    def _choose(self, number: Value, arguments: Value, hit: Value) -> None:
        f = self.f
        here = f.block
        actions = self.plan.actions
        if not actions:
            f.branch(self.pipeline._block(self.spec.next_miss))
            return
        for action in actions:
            self.arms[action].append(_Arm(here, arguments, hit))
        # A record never names another action, so the last one needs no comparison.
        f.switch(number, self.targets[actions[-1]], [(a, self.targets[a]) for a in actions[:-1]])

    def _go(self, action: int, arguments: Sequence[int], hit: Value) -> None:
        data = self.pipeline.plan.arguments[action].pack(arguments)
        pointer = self.f.module.constant(data, 16) if data else NULL
        self.arms[action].append(_Arm(self.f.block, pointer, hit))
        self.f.branch(self.targets[action])

    def _action(self, action: int) -> None:
        arms, f, spec, pipeline = self.arms[action], self.f, self.spec, self.pipeline
        if not arms:
            return
        f.start(self.targets[action])
        pointer = f.phi(NULL, [(a.arguments, a.block) for a in arms])
        hit = f.phi(FALSE, [(a.hit, a.block) for a in arms]) if spec.by_hit else FALSE
        layout = pipeline.plan.arguments[action]
        if layout.widths:
            pipeline._run(action, RecordArguments(layout, pointer))
        else:
            pipeline._run(action, ConstantArguments(layout, ()))
        if spec.by_hit:
            after = f.new_block("after")
            pipeline._after_action(action, after)
            f.start(after)
            f.branch_if(hit, pipeline._block(spec.next_hit), pipeline._block(spec.next_miss))
            return
        name = self.program.actions[action].name
        following = self.next_by_name.get(name, spec.next_miss)
        pipeline._after_action(action, pipeline._block(following))

    # --- direct externs, profiles -------------------------------------------------------------

    def _count_hit(self, state: Value) -> None:
        spec, f, scope = self.spec, self.f, self.scope
        if not (spec.with_counters or spec.meter is not None or spec.support_timeout):
            return
        base = f.load_pointer(scope.word(f"table.{self.plan.number}.states"))
        at = f.at(base, f.mul(f.zext(state, 64), i64(STATE_BYTES)))
        if spec.with_counters:
            f.increment(at)
            f.increment(f.at(at, 8), scope.register(REG_INGRESS_LENGTH))
        if spec.meter is not None:
            meter = self.program.meters[spec.meter]
            if meter.target is not None:
                actions = self.pipeline.actions
                pointer = f.acquire_pointer(f.at(at, 24))
                amount = actions.metered(meter.unit)
                colour = self.pipeline.tools.runtime.meter(scope, pointer, amount)
                actions.store(meter.target, Number(colour, 0, 255))
        if spec.support_timeout:
            f.store(scope.register(REG_NOW), f.at(at, 16), 8)

    def _member(self, record: Value) -> Value:
        """The record of the member that an indirect entry leads to."""
        f, scope, layout = self.f, self.scope, self.plan.record
        profile = self.spec.action_profile
        assert profile is not None
        selector = self.program.action_profiles[profile].selector
        slots = f.load_pointer(scope.word(f"profile.{profile}.slots"))
        target = f.load(32, f.at(record, layout.target), 4)
        if selector is not None:
            kind = f.load(32, f.at(record, layout.kind), 4)
            single, group = f.new_block("single"), f.new_block("group")
            chosen = f.new_block("chosen")
            f.branch_if(f.compare("eq", kind, integer(32, TO_MEMBER)), single, group)
            f.start(group)
            groups = f.load_pointer(scope.word(f"profile.{profile}.groups"))
            members = f.acquire_pointer(f.at(groups, f.shl(f.zext(target, 64), 3)))
            count = f.load(64, members, 8)
            # An empty group does nothing and ends as a miss.
            following = self.spec.next_hit if self.spec.by_hit else self.spec.next_miss
            f.leave_if(f.compare("eq", count, i64(0)), self.pipeline._block(following))
            number = f.urem(self._selector_hash(profile, selector), count)
            of_group = f.load(32, f.at(f.at(members, 8), f.shl(number, 2)), 4)
            last = f.block
            f.branch(chosen)
            f.start(single)
            f.branch(chosen)
            f.start(chosen)
            target = f.phi(integer(32, 0), [(of_group, last), (target, single)])
        index = f.acquire(32, f.at(slots, f.shl(f.zext(target, 64), 2)))
        records = f.load_pointer(scope.word(f"profile.{profile}.records"))
        size = align(self.pipeline.plan.member_bytes[profile], 16)
        return f.at(records, f.mul(f.zext(index, 64), i64(size)))

    def _selector_hash(self, profile: int, selector: ir.Selector) -> Value:
        packer = Packer(self.scope, selector.fields)
        buffer = self.f.alloca(packer.max_bytes + SPARE_BYTES)
        length = packer.pack(buffer)
        hashes, state = self.pipeline.tools.hashes, f"selector.{profile}"
        return hashes.run(self.scope, selector.algorithm, state, buffer, length)


def reachable(program: ir.Program, start: int | None) -> set[int]:
    """Nodes that a pipeline can come to."""
    found: set[int] = set()
    todo: list[int | None] = [start]
    while todo:
        number = todo.pop()
        if number is None or number in found:
            continue
        found.add(number)
        todo += ir.successors(program.nodes[number])
    return found


def written_headers(program: ir.Program, plan: ProgramPlan, pipeline: ir.Pipeline) -> set[int]:
    """Packet headers whose fields the pipeline, or the deparser behind it, can change."""
    written: set[int] = set()
    everything = {n for n, h in enumerate(program.headers) if not h.metadata}

    def target(value: ir.LValue | ir.HeaderExpr) -> None:
        match value:
            case ir.FieldRef(header) | ir.HeaderOf(header):
                written.add(header)
            case _:
                written.update(everything)

    def statements(body: Sequence[ir.Statement]) -> None:
        for s in body:
            match s:
                case ir.Assign() | ir.AssignVarbit() | ir.AssignHeader() | ir.Hash():
                    target(s.target)
                case ir.ExecuteMeter() | ir.RegisterRead() | ir.Random():
                    target(s.target)
                case ir.AddHeader(header):
                    target(header)
                case ir.AssignUnion() | ir.AssignStack() | ir.Push() | ir.Pop():
                    written.update(everything)
                case _:
                    pass

    for number in reachable(program, pipeline.start):
        node = program.nodes[number]
        if isinstance(node, ir.ActionCall):
            statements(program.actions[node.action].body)
        elif isinstance(node, ir.Table):
            for action in plan.tables[number].actions:
                statements(program.actions[action].body)
            meter = None if node.meter is None else program.meters[node.meter].target
            if meter is not None:
                target(meter)
    for checksum in program.checksums:
        if checksum.update:
            target(checksum.target)
    statements(program.deparser.statements)
    return {h for h in written if not program.headers[h].metadata}
