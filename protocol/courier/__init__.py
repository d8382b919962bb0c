"""The courier: gets of blocks that other nodes hold, from a client's question to its answer, in
compiled code.

Owns: which questions are well-formed; the READ for a block, the landing place that its first DATA
gets, its digest; the client's answer; and what Python hears of it afterwards. Must not know:
sockets, clocks, sessions, or why Python allows what it allows.

A block of more than one segment is read so far that it is known whether anybody shares it, by its
first segment. If nobody does, and its home has offered another way, the rest comes by the conveyor
(`kvcast.protocol.conveyor`), into the same landing place, of one of the nodes that there is a
conveyor from. If somebody does, READs are better, and the agent's.

Python says beforehand what the courier may do: which home each bucket is asked at, if any, which
namespaces may be looked up (the index in shared memory says so), how much a client may hold, and
*landing places*, room for a block of one size in one namespace each. A question that the courier
does not take, or not to its end (another size, silence, MISS, a wrong digest), is answered
by `ASK_AGENT`: the client then asks by the socket, as for any other block, and all decisions are
the requester's. The courier keeps nothing of such a question; so what has begun to come is waited
for as long as more does, and chunks that are lost are asked for again here, `MOST_REPAIRS` times.

What has happened stands in *records*, which Python takes before it does anything else. So nothing
that the courier has given to a client is ever unknown to the code that might evict it. A record is
whole before the client is told; where the records lie in memory that outlives the process, the
agent that comes after reads there what this one had not taken yet.

A question that is asked while another client's is in flight for the same block waits for the same
answer. What lies here already, or may lie below DRAM, and what Python is fetching, is Python's to
answer.
"""

from kvcast.protocol.courier.arrivals import came, frame_came
from kvcast.protocol.courier.consistency import check
from kvcast.protocol.courier.conveyed import block_came, cut_off, progressed, reply_came
from kvcast.protocol.courier.endings import (
    answer_in,
    answered_one,
    begin_answer,
    begin_batch,
    check_of,
    close_batch,
)
from kvcast.protocol.courier.hearing import hear
from kvcast.protocol.courier.in_flight import asked_for, bucket_of_key, due_by
from kvcast.protocol.courier.library import RECORD, Told, blank, compiled, fits
from kvcast.protocol.courier.permissions import (
    may_be_below,
    may_be_here,
    may_hear,
    may_look_up,
    meaning_in_force,
    taker_for,
)
from kvcast.protocol.courier.requests import next_read
from kvcast.protocol.courier.states import AskedState, become, transition_bits
from kvcast.protocol.courier.structures import (
    ANSWERS,
    BATCHES,
    CLIENT_GONE,
    CLIENT_HERE,
    CLIENT_OFFENDS,
    COMPANY,
    DEADLINE,
    GIVEN_UP,
    HEADS,
    JOINED,
    LANDED,
    LANDING_BOOKED,
    LANDING_FREE,
    LANDING_PUSHED,
    LANDING_TAKEN,
    LANDINGS,
    LEAST_PART,
    MAX_ASKED,
    MAX_ASKED_A_CLIENT,
    MOST_HOMES,
    MOST_REPAIRS,
    NO_READ,
    NOBODY,
    NOT_OFFERED,
    OFFENCE,
    REASONS,
    RECORDS,
    RECORDS_ENOUGH,
    RELEASED,
    SEND_READ,
    SILENCE,
    WRONG_DIGEST,
    YIELDED,
    Answer,
    Asked,
    Batch,
    Client,
    Courier,
    Landing,
    Question,
    Record,
    call_digest,
    call_reset,
    call_update,
)
from kvcast.protocol.courier.waiting import expire

__all__ = [
    "ANSWERS",
    "BATCHES",
    "CLIENT_GONE",
    "CLIENT_HERE",
    "CLIENT_OFFENDS",
    "COMPANY",
    "DEADLINE",
    "GIVEN_UP",
    "HEADS",
    "JOINED",
    "LANDED",
    "LANDINGS",
    "LANDING_BOOKED",
    "LANDING_FREE",
    "LANDING_PUSHED",
    "LANDING_TAKEN",
    "LEAST_PART",
    "MAX_ASKED",
    "MAX_ASKED_A_CLIENT",
    "MOST_HOMES",
    "MOST_REPAIRS",
    "NOBODY",
    "NOT_OFFERED",
    "NO_READ",
    "OFFENCE",
    "REASONS",
    "RECORD",
    "RECORDS",
    "RECORDS_ENOUGH",
    "RELEASED",
    "SEND_READ",
    "SILENCE",
    "WRONG_DIGEST",
    "YIELDED",
    "Answer",
    "Asked",
    "AskedState",
    "Batch",
    "Client",
    "Courier",
    "Landing",
    "Question",
    "Record",
    "Told",
    "answer_in",
    "answered_one",
    "asked_for",
    "become",
    "begin_answer",
    "begin_batch",
    "blank",
    "block_came",
    "bucket_of_key",
    "call_digest",
    "call_reset",
    "call_update",
    "came",
    "check",
    "check_of",
    "close_batch",
    "compiled",
    "cut_off",
    "due_by",
    "expire",
    "fits",
    "frame_came",
    "hear",
    "may_be_below",
    "may_be_here",
    "may_hear",
    "may_look_up",
    "meaning_in_force",
    "next_read",
    "progressed",
    "reply_came",
    "taker_for",
    "transition_bits",
]
