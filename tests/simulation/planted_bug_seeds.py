"""Seeds that show the planted bugs, as `find_planted_bugs.py` found them.

`first`: the first seed, from 1 on, that shows the bug; `runs`: how many of the seeds until then
were run, in the others it cannot show; `quick`: the seed that shows it in the least time, among
the first and some after it, which the suite takes.
"""

from __future__ import annotations

from typing import NamedTuple


class Known(NamedTuple):
    first: int
    runs: int
    quick: int


SEEDS: dict[str, Known] = {
    "nodes say that they have handed all over before they have": Known(21, 7, 21),
    "the controller does not wait until all is handed over": Known(21, 7, 21),
    "who replicates a block may answer for every bucket": Known(111, 15, 111),
    "the reader does not compare the digest of the whole block": Known(9, 9, 9),
    "what has outlived its time is kept": Known(3, 3, 14),
    "the reader takes DATA from any node": Known(8, 1, 8),
    "a READ that is not answered is never repeated": Known(3, 3, 3),
    "a repeated READ is not marked as one, and joins its own wait": Known(20, 20, 20),
    "a MISS sends all who waited on with READs marked as repeats": Known(37, 37, 37),
    "a segment counts as complete when its last chunk is there": Known(1, 1, 4),
    "the home sends chunks that begin one byte too early": Known(1, 1, 1),
    "the home does not mark the end of its answers": Known(1, 1, 1),
    "a block may be evicted while its answer waits to be sent": Known(55, 55, 73),
    "a home answers for the block of another namespace that has the same key": Known(2, 2, 2),
    "eviction does not look at pins": Known(1, 1, 2),
    "an agent evicts without a look at what clients pin by themselves": Known(1, 1, 2),
    "what is evicted stays in the index that clients read": Known(1, 1, 2),
    "bytes that came by TCP are stored under the digest that was promised": Known(34, 3, 34),
    "what came by RDMA is not compared with its digest": Known(1011, 66, 1011),
    "what is pushed home is not compared with its digest": Known(300, 24, 300),
    "what homes say that they hold is not counted": Known(4, 1, 4),
    "of blocks that are put together the last is answered first": Known(5, 1, 5),
    "what comes from the object store is not compared with its digest": Known(158, 24, 158),
    "what an RDMA connection held when it broke is never given back": Known(9, 2, 9),
    "TCP requests are served whatever their namespace": Known(15, 1, 19),
    "READs are answered whatever their namespace": Known(244, 19, 268),
    "an agent keeps the first complete map that it gets": Known(2, 2, 5),
    "reads go on when the controller gives a node's number to another": Known(9807, 358, 9807),
    "the only home of a block believes whoever it asks for it": Known(147, 9, 147),
    "a put is acknowledged before any home has it": Known(1, 1, 1),
    "a get waits for the fetch that it joined, beyond its own deadline": Known(1, 1, 2),
    "a restarted agent believes its old index without looking at the bytes": Known(997, 29, 997),
    "a restarted agent believes entries that do not prove themselves": Known(383, 15, 383),
    "what a connection held when it broke is never given back": Known(12, 12, 88),
    "the second piece of a block that comes by TCP is written over the first": Known(19, 19, 19),
    "an agent that has lost the controller does not come back": Known(4, 3, 4),
    "a node's lease never runs out": Known(8, 1, 8),
    "a slot is given to the next block under the same generation": Known(1, 1, 1),
    "the controller tells the switch that every port may answer for every bucket": Known(15, 3, 19),
    "the controller lets every port read every namespace": Known(15, 1, 19),
    "the switch lets a repeated READ join the wait that it repeats": Known(20, 20, 20),
    "the switch clears the waiting ports, and the fingerprint not": Known(1, 1, 1),
    "a MISS does not end the wait": Known(1, 1, 5),
    "the last chunk does not end the wait": Known(1, 1, 2),
    "the first chunk ends the wait": Known(1, 1, 2),
    "a READ waits for ever for an answer that does not come": Known(1, 1, 2),
    "no READ joins another": Known(1, 1, 1),
    "a READ joins the wait for whatever has the same hash": Known(34, 4, 34),
    "an answer looks at the first entry of its set alone": Known(22, 2, 31),
    "the switch does not check who answers for a bucket": Known(15, 3, 19),
    "the switch does not check who may read a namespace": Known(15, 1, 19),
    "the switch does not check source addresses": Known(10, 2, 41),
    "a chunk of another copy is stored under the resident's digest": Known(855, 95, 855),
    "the switch serves the chunk after the one that it says": Known(1, 1, 2),
    "shared answers go to every port": Known(3, 3, 18),
    "shared answers keep the address of one reader": Known(1, 1, 1),
    "what a lone reader gets by TCP is taken for what was promised": Known(22, 5, 22),
    "what was written by RDMA is not compared with its digest": Known(93, 4, 93),
    "a slot is given to a segment before the one that has it has ended": Known(11, 2, 11),
    "a block may be evicted while the card still writes it to others": Known(750, 92, 750),
    "RDMA to a landing zone is ordinary traffic to the switch": Known(41, 1, 41),
    "a WRITE is copied to the queue pair that it came for": Known(3, 1, 3),
    "what is damaged on a disk is given all the same": Known(10, 4, 10),
    "a file of another cluster is believed": Known(46, 2, 46),
    "a block is as old as the wall clock says, be it stored tomorrow": Known(14, 1, 14),
    "a namespace may exceed its quota by the block that comes": Known(12, 3, 12),
    "what is assured to a namespace is everybody's": Known(94, 5, 94),
    "an arena of another cluster is believed": Known(14, 2, 32),
    "a prefix stays when its beginning goes": Known(15, 3, 29),
    "a prefix stays in other tiers when its beginning goes": Known(13, 2, 13),
    "a block that came before its ancestor stays when that goes": Known(10, 1, 13),
    "weights of namespaces count for nothing between nodes": Known(40, 5, 40),
    "a controller that knows nothing begins with the generations of the one before": Known(
        173, 35, 173
    ),
    "a namespace that is made again is the one that was deleted": Known(2, 2, 5),
    "agents keep what is deleted": Known(1, 1, 2),
    "what exceeds a quota that becomes smaller stays": Known(9, 8, 9),
    "what clients hold of a former agent is anybody's room": Known(3, 3, 5),
    "what clients have given back stays in the ledger": Known(1, 1, 2),
    "what is damaged in a further arena is given all the same": Known(8, 3, 8),
    "what exceeds a namespace's quota of further arenas stays there": Known(4, 3, 4),
}
