"""Helpers in IR that programs call: the arena, meters, random numbers.

The arithmetic is that of `reference.externs`, and the random numbers are those of Python's
generator (MT19937 as `random.Random` uses it), so that both engines draw the same.
"""

from __future__ import annotations

from kvcast.native.subset import U32, U64, Ptr, compile_into, native
from kvcast.native.writer import NULL, Function, Module, Value, i64, integer
from kvcast.switchsim.llvm.layout import METER_HEAD_BYTES, METER_RATE_BYTES, REG_NOW
from kvcast.switchsim.llvm.scope import Scope

RANDOM_WORDS = 624


class Runtime:
    """Helpers of one module, each made when first asked for."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._made: dict[str, Function] = {}

    # --- the arena --------------------------------------------------------------------------

    def allocate(self, scope: Scope, size: Value) -> Value:
        """Memory until the frame is done; null if there is no more."""
        f = scope.f
        at = f.load(64, scope.word("arena_at"), 8)
        end = f.load(64, scope.word("arena_end"), 8)
        after = f.add(at, f.and_(f.add(size, i64(63)), i64(-64)))
        good = f.compare("ule", after, end)
        f.store(f.select(good, after, at), scope.word("arena_at"), 8)
        pointer = f.at(f.load_pointer(scope.word("arena")), at)
        return f.select(good, pointer, NULL)

    # --- meters -----------------------------------------------------------------------------

    def meter(self, scope: Scope, meter: Value, amount: Value) -> Value:
        """Execute a meter (null: one without rates); gives the colour as i8."""
        if "meter" not in self._made:
            self._made["meter"] = self._meter()
        now = scope.f.load(64, scope.slot(REG_NOW), 8)
        return scope.f.call(self._made["meter"], [meter, amount, now])

    def _meter(self) -> Function:
        f = self._module.function("meter", "i8", [("ptr", "m"), ("i64", "amount"), ("i64", "now")])
        meter, amount, now = f.arguments
        some, none = f.new_block("rates"), f.new_block("green")
        f.branch_if(f.compare("eq", meter, NULL), none, some)
        f.start(none)
        f.ret(integer(8, 0))
        f.start(some)
        rates = f.load(64, meter, 8)
        time = f.raw("double", f"uitofp {now} to double")
        with f.times(rates) as n:
            bucket = f.at(f.at(meter, METER_HEAD_BYTES), f.mul(n, i64(METER_RATE_BYTES)))
            speed = f.raw("double", f"load double, {bucket}, align 8")
            product = f.raw("double", f"fmul {time}, {speed.text}")
            since = f.intrinsic("llvm.fptosi.sat.i64.f64", "i64", [product])
            burst = f.load(64, f.at(bucket, 8), 8)
            tokens = f.load(64, f.at(bucket, 16), 8)
            seen = f.load(64, f.at(bucket, 24), 8)
            passed = f.and_(f.compare("sge", seen, i64(0)), f.compare("sgt", since, seen))
            grown, room = f.sub(since, seen), f.sub(burst, tokens)
            full = f.compare("uge", grown, room)
            refilled = f.select(full, burst, f.add(tokens, grown))
            tokens = f.select(passed, refilled, tokens)
            later = f.select(f.compare("sgt", since, seen), since, seen)
            f.store(later, f.at(bucket, 24), 8)
            short, enough = f.new_block("short"), f.new_block("enough")
            f.branch_if(f.compare("slt", tokens, amount), short, enough)
            f.start(short)
            f.store(tokens, f.at(bucket, 16), 8)
            f.ret(f.trunc(f.sub(rates, n), 8))
            f.start(enough)
            f.store(f.sub(tokens, amount), f.at(bucket, 16), 8)
        f.ret(integer(8, 0))
        return f

    # --- random numbers ---------------------------------------------------------------------

    def random(self, scope: Scope, low: Value, high: Value) -> Value:
        """A number in low .. high (64 bits, low <= high)."""
        if "random" not in self._made:
            made = compile_into(self._module, [random_between], exported=False)
            self._made["random"] = made[0]
        state = scope.f.load_pointer(scope.word("random"))
        arguments = [state, scope.word("random_at"), low, high]
        return scope.f.call(self._made["random"], arguments)


@native
def random_word(state: Ptr[U32], at: Ptr[U64]) -> U32:
    """genrand_uint32 of Matsumoto and Nishimura."""
    if at[0] >= RANDOM_WORDS:
        for n in range(RANDOM_WORDS):
            y = (state[n] & 0x80000000) | (state[(n + 1) % RANDOM_WORDS] & 0x7FFFFFFF)
            twist = 0x9908B0DF if y & 1 else 0
            state[n] = state[(n + 397) % RANDOM_WORDS] ^ (y >> 1) ^ twist
        at[0] = 0
    y = state[at[0]]
    at[0] += 1
    y ^= y >> 11
    y ^= (y << 7) & 0x9D2C5680
    y ^= (y << 15) & 0xEFC60000
    return y ^ (y >> 18)


@native
def random_between(state: Ptr[U32], at: Ptr[U64], low: U64, high: U64) -> U64:
    """random.Random.randint: draw as many bits as the number of choices has until they are below
    it. There may be 2**64 choices, which have 65 bits."""
    span = high - low
    bits = 0
    while bits < 64 and (span + 1) >> bits != 0:
        bits += 1
    if span + 1 == 0:
        bits = 65
    while True:
        value = 0
        beyond = 0
        for n in range((bits + 31) // 32):
            drawn = 0 + random_word(state, at)
            if bits - 32 * n < 32:
                drawn >>= 32 - (bits - 32 * n)
            if n == 2:
                beyond = drawn
            else:
                value |= drawn << 32 * n
        if beyond == 0 and value <= span:
            return low + value
