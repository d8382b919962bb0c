// What the controls say to each other: the state of one frame on its way through the pipeline. No
// target's types: those, and the headers that it parses, live under v1model/ and tna/.

#ifndef KVCAST_TYPES_P4_
#define KVCAST_TYPES_P4_

#include "generated/kvcast_headers.p4"
#include "sizes.p4"

// ---- what a frame is (control FrameClass) --------------------------------------------------
const bit<8> KIND_ORDINARY     = 0;   // not kvcast, or the switch is told to be a plain one
const bit<8> KIND_MALFORMED    = 1;
const bit<8> KIND_READ         = 2;   // of a full segment: the only one that coalesces
const bit<8> KIND_PARTIAL_READ = 3;
const bit<8> KIND_DATA         = 5;
const bit<8> KIND_LAST_DATA    = 6;   // ends the wait
const bit<8> KIND_MISS         = 7;   // ends the wait
const bit<8> KIND_PLAIN_DATA   = 8;   // answers a PARTIAL READ: touches nobody else's wait
const bit<8> KIND_PLAIN_ANSWER = 9;   // OFFER, and a MISS that answers a PARTIAL READ

// ---- what became of it (table decisions, one counter each) ---------------------------------
const bit<8> DECISION_NONE      = 0;  // not decided yet; never counted
const bit<8> DECISION_HIT       = 1;  // READ answered from switch memory (counted once a READ)
const bit<8> DECISION_JOIN      = 2;  // READ dropped: its answer is already on the way
const bit<8> DECISION_NEW       = 3;  // READ opened a pending entry, and went to the home
const bit<8> DECISION_COLLIDE   = 4;  // READ met another key's live entry, and went plain
const bit<8> DECISION_EXPIRED   = 5;  // READ took over an entry past its lease, and went
const bit<8> DECISION_RETRY     = 6;  // READ repeated by its reader: refreshed the entry, and went
const bit<8> DECISION_PARTIAL   = 7;  // READ of a part of a segment: went plain
const bit<8> DECISION_SHARED    = 8;  // DATA or MISS multicast to several ports
const bit<8> DECISION_UNICAST   = 9;  // DATA, MISS or OFFER sent to its destination alone
const bit<8> DECISION_GUARDED   = 10; // kvcast frame of a source, namespace or bucket not allowed
const bit<8> DECISION_DROPPED   = 11; // no route, malformed, parser error, TTL
const bit<8> DECISION_FORWARDED = 12; // ordinary traffic
const bit<8> DECISION_SERVING   = 13; // one more chunk served to a READ already counted as HIT

// ---- what became of a chunk of a resident segment that passed (table fills) ----------------
const bit<8> FILL_NONE         = 0;
const bit<8> FILL_FILLED       = 1;
const bit<8> FILL_WRONG_DIGEST = 2;   // another copy of the block than the admitted one
const bit<8> FILL_NO_CHUNK     = 3;   // a chunk that the admitted segment does not have

// ---- where it goes (per-target control Delivery, and egress) -------------------------------
const bit<8> DELIVER_NOWHERE     = 0; // the default: a frame that nobody decided on is dropped
const bit<8> DELIVER_UNICAST     = 1; // to out_port
const bit<8> DELIVER_FLOOD       = 2; // to all ports but the one it came from
const bit<8> DELIVER_SERVE       = 3; // a chunk to the reader, and the READ round again
const bit<8> DELIVER_SERVE_GROUP = 4; // a chunk to every port of the reader's group, likewise
const bit<8> DELIVER_SHARED      = 5; // to port_bits, by multicast, filter and rewrite

// Multicast group of all host ports: always right, since egress filters by port_bits.
const bit<16> ALL_PORTS_GROUP = 1;
// The replica of a serve group that goes round again instead of out.
const bit<16> RECIRCULATE_RID = 255;

// One pending entry, as read and as to be written back. Free: all zero.
struct pending_entry_t {
    bit<32> fingerprint;  // [31:16] namespace, whole, so that no two tenants ever share an entry;
                          // [15:1] hash of key and segment; [0] 1, so that it is never 0
    bit<32> stamp;        // tick of the last READ sent on, or answer seen
    bit<32> ports;        // bit p-1: port p waits
}

// One heat message to the controller: a segment whose READs crossed the threshold. Once a window.
struct heat_t {
    bit<16>  namespace;
    bit<16>  segment;
    bit<128> key;
    bit<32>  port_bits;   // ports that wait now, the reader's included
    bit<32>  reader_bit;
    bit<32>  count;       // READs in this window so far, by the sketch (never too low)
}

struct state_t {
    // Carried round with a READ that is being served (field list 1).
    @field_list(1) bit<32> serving_generation;
    @field_list(1) bit<16> serve_group;
    @field_list(1) bit<32> port_bits;        // ports that the frame is for
    @field_list(1) bit<8>  delivery;         // DELIVER_*

    // settings
    bit<8>  enabled;
    bit<32> lease_ticks;
    bit<32> heat_threshold;

    // the frame
    bit<32> now;            // ticks of 64 us
    bit<1>  broken;         // the parser gave up: too short, or a disguise
    bit<1>  damaged;        // the IPv4 header checksum is wrong
    bit<1>  misfit;         // the frame is not as long as its IPv4 header says, if one can tell
    bit<8>  kind;           // KIND_*
    bit<1>  is_answer;      // DATA, MISS, OFFER
    bit<1>  has_memory;     // may be served from, or fill, switch memory
    bit<1>  coalesces;      // takes part in the pending table
    bit<1>  refused;        // goes nowhere (control Gate)
    bit<1>  rewritten;      // the IPv4 header checksum must be made anew
    bit<8>  decision;       // DECISION_*

    // who asks
    bit<1>  admitted;       // its address is bound to its port
    bit<1>  permitted;      // READ: its namespace is allowed there; answer: the bucket is its own
    bit<32> reader_bit;     // of the port that the frame came in by
    bit<1>  grouped;        // the READ names a reader group that it belongs to

    // forwarding
    bit<9>  out_port;
    bit<32> out_bit;        // its bit; 0 if there is no single known destination
    bit<1>  to_router;
    bit<16> group;          // multicast group

    // pending
    bit<32>         hash;       // of namespace, key and segment
    bit<32>         fingerprint;
    pending_entry_t entry;
    bit<1>          free;       // the entry is
    bit<1>          mine;       // it is this key's
    bit<1>          stale;      // it is past its lease
    bit<32>         others;     // READ: own bit if set there; answers: who waits but the addressee
    bit<1>          demand;     // counts for heat

    // switch memory
    bit<1>  resident;
    slot_index_t slot;
    bit<32> generation;
    bit<64> chunk_mask;     // chunks that the segment has
    bit<64> resident_digest;
    bit<64> digest_difference;      // 0: the frame is of the admitted copy
    bit<32> resident_size;
    bit<64> chunk_bit;      // of the chunk that passes, if the segment has it
    bit<64> fill_bit;       // the chunk to be stored now, else 0
    bit<8>  fill;           // FILL_*
    bit<64> valid;          // chunks stored, under this generation
    bit<1>  serving;        // attach a chunk to this frame
    bit<64> remaining;      // chunks to be served, this one included
    bit<1>  last;           // no other chunk comes after it

    // what only one target's controls say to each other (its arch.p4)
    TARGET_STATE

    // egress
    bit<32> member;         // port_bits, cut to the copy's own port
}

#endif
