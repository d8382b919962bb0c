// Generated from p4/definitions.py by `python -m kvcast.p4.generate`; do not edit.

#ifndef KVCAST_GENERATED_CODES_P4_
#define KVCAST_GENERATED_CODES_P4_

// What a frame is (control FrameClass).
const bit<8> KIND_ORDINARY = 0x00;        // not kvcast, or the switch is told to be a plain one
const bit<8> KIND_MALFORMED = 0x01;
const bit<8> KIND_READ = 0x02;            // of a full segment: the only one that coalesces
const bit<8> KIND_PARTIAL_READ = 0x03;
const bit<8> KIND_DATA = 0x05;
const bit<8> KIND_LAST_DATA = 0x06;       // ends the wait; WRITTEN is one
const bit<8> KIND_MISS = 0x07;            // ends the wait
const bit<8> KIND_PLAIN_DATA = 0x08;      // answers a PARTIAL READ: touches nobody else's wait
const bit<8> KIND_PLAIN_ANSWER = 0x09;    // OFFER, and a MISS that answers a PARTIAL READ
const bit<8> KIND_WRITE = 0x0a;           // RDMA WRITE for whoever waits; treated like DATA
const bit<8> KIND_TO_ZONE = 0x0b;         // RoCE that a host sent to a reader's landing zone itself

// What became of a frame (table decisions, one counter each).
const bit<8> DECISION_NONE = 0x00;        // not decided yet; never counted
const bit<8> DECISION_HIT = 0x01;         // READ answered from switch memory (counted once a READ)
const bit<8> DECISION_JOIN = 0x02;        // READ dropped: its answer is already on the way
const bit<8> DECISION_NEW = 0x03;         // READ opened a pending entry, and went to the home
const bit<8> DECISION_COLLIDE = 0x04;     // READ met another segment's live entry, and was forwarded plainly
const bit<8> DECISION_EXPIRED = 0x05;     // READ took over an entry past its lease, and went to the home
const bit<8> DECISION_RETRY = 0x06;       // READ repeated by its reader: refreshed the entry, and went to the home
const bit<8> DECISION_PARTIAL = 0x07;     // READ of a part of a segment: forwarded plainly
const bit<8> DECISION_SHARED = 0x08;      // DATA, WRITTEN, MISS or an RDMA WRITE multicast to who waits
const bit<8> DECISION_UNICAST = 0x09;     // DATA, MISS or OFFER sent to its destination alone
const bit<8> DECISION_GUARDED = 0x0a;     // kvcast frame of a source, namespace or bucket not allowed
const bit<8> DECISION_DROPPED = 0x0b;     // no route, malformed, parser error, TTL
const bit<8> DECISION_FORWARDED = 0x0c;   // ordinary traffic
const bit<8> DECISION_SERVING = 0x0d;     // one more chunk served to a READ already counted as HIT

// What became of a chunk of a resident segment that passed (table fills).
const bit<8> FILL_NONE = 0x00;            // not such a chunk; never counted
const bit<8> FILL_FILLED = 0x01;          // stored
const bit<8> FILL_WRONG_DIGEST = 0x02;    // of another copy of the block than the admitted one
const bit<8> FILL_NO_CHUNK = 0x03;        // a chunk that the admitted segment does not have

// Where a frame goes (each target's control Delivery or Departure, and egress).
const bit<8> DELIVER_NOWHERE = 0x00;      // the default: a frame that nobody decided on is dropped
const bit<8> DELIVER_UNICAST = 0x01;      // to out_port
const bit<8> DELIVER_FLOOD = 0x02;        // to all ports but the one it came from
const bit<8> DELIVER_SERVE = 0x03;        // a chunk to the reader, and the READ round again
const bit<8> DELIVER_SERVE_GROUP = 0x04;  // a chunk to every port of the reader's group, likewise
const bit<8> DELIVER_SHARED = 0x05;       // to port_bits, by multicast, filter and rewrite
const bit<8> DELIVER_WRITE_SHARED = 0x06; // the same with an RDMA WRITE

// Multicast group of all host ports: always right, since egress filters by port_bits.
const bit<16> ALL_PORTS_GROUP = 0x0001;
// Replication id of the copy that goes round again instead of out.
const bit<16> RECIRCULATE_RID = 0x00ff;

#endif
