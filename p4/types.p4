// What the controls tell each other about one frame on its way through the pipeline. Types of a
// single target, and the headers that it parses, are in v1model/ and tna/.

#ifndef KVCAST_TYPES_P4_
#define KVCAST_TYPES_P4_

#include "generated/codes.p4"
#include "generated/kvcast_headers.p4"
#include "generated/roce.p4"
#include "sizes.p4"

// One pending entry, as read and as to be written back. Free: all zero.
struct pending_entry_t {
    bit<32> fingerprint;  // [31:16] namespace, whole, so that no two tenants ever share an entry;
                          // [15:1] hash of key and segment, [0] 1, so that it is never 0; or, of a
                          // shared answer by RDMA, [15:9] 0x40, [8:2] its slot, [1] of its index
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

struct local_metadata_t {
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
    bit<1>  coalesces;      // takes part in the pending interest table
    bit<1>  formed;         // an RDMA WRITE as a home makes it for whoever waits
    bit<1>  refused;        // goes nowhere (control Gate)
    bit<1>  rewritten;      // the IPv4 header checksum must be made anew
    bit<8>  decision;       // DECISION_*

    // who asks
    bit<1>  admitted;       // its address is bound to its port
    bit<1>  permitted;      // READ: its namespace is allowed there; answer: from a home
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
    pending_entry_t entry;      // of the two of a set, the one that the frame is about
    bit<1>          free;       // the entry is
    bit<1>          mine;       // it is this key's
    bit<1>          stale;      // it is past its lease
    bit<32>         others;     // who waits for the answer but its addressee
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

    // what only one target's controls tell each other (its arch.p4)
    TARGET_METADATA

    // egress
    bit<32> member;         // port_bits, cut to the copy's own port
}

#endif
