// What one packet carries through the pipeline, and the codes that name decisions.

#ifndef KVCAST_TYPES_P4_
#define KVCAST_TYPES_P4_

struct headers_t {
    ethernet_h ethernet;
    ipv4_h ipv4;
    udp_h udp;
    kvcast_h kvcast;
    read_padding_h padding;
    cell_h cell;
}

// One packet, one fate: keys of the table `decisions`.
const bit<8> DECIDE_NOTHING = 0;
const bit<8> DECIDE_HIT = 1;         // READ: served from SRAM
const bit<8> DECIDE_JOIN = 2;        // READ: waits for an answer that is on its way
const bit<8> DECIDE_NEW = 3;         // READ: the first of its segment, forwarded
const bit<8> DECIDE_COLLIDE = 4;     // READ: its entry is another segment's, forwarded plain
const bit<8> DECIDE_EXPIRED = 5;     // READ: took over an entry whose lease had run out, forwarded
const bit<8> DECIDE_RETRY = 6;       // READ: repeated, entry refreshed, forwarded
const bit<8> DECIDE_PARTIAL = 7;     // READ: for part of a segment, forwarded plain
const bit<8> DECIDE_SHARED = 8;      // DATA, MISS: to everybody who waits
const bit<8> DECIDE_UNICAST = 9;     // DATA, MISS, OFFER: to the reader it is addressed to
const bit<8> DECIDE_GUARDED = 10;    // kvcast: not from a port that may send it, dropped
const bit<8> DECIDE_DROPPED = 11;    // malformed, or nowhere to go
const bit<8> DECIDE_FORWARDED = 12;  // ordinary traffic
const bit<8> DECIDE_SERVING = 13;    // a served READ on a later pass

// What became of DATA of a resident segment: keys of the table `fills`.
const bit<8> FILL_NONE = 0;
const bit<8> FILL_FILLED = 1;
const bit<8> FILL_WRONG_DIGEST = 2;  // another copy's bytes
const bit<8> FILL_NO_CHUNK = 3;      // a chunk that the segment does not have

// What the pending table found.
const bit<8> PENDING_FREE = 1;       // nothing, taken
const bit<8> PENDING_EXPIRED = 2;    // an entry whose lease had run out, taken over
const bit<8> PENDING_SAME = 3;       // this segment's
const bit<8> PENDING_OTHER = 4;      // another segment's

// Where a packet goes.
const bit<8> ROUTE_NONE = 0;
const bit<8> ROUTE_PORT = 1;
const bit<8> ROUTE_FLOOD = 2;
const bit<8> ROUTE_ROUTER = 3;

// What egress does with a copy.
const bit<8> COPY_PLAIN = 0;
const bit<8> COPY_FLOOD = 1;         // not back to where it came from
const bit<8> COPY_SHARED = 2;        // to the ports in copy_bits, addressed to their hosts
const bit<8> COPY_SERVE = 3;         // likewise, as DATA made of a READ

const bit<16> ALL_PORTS_GROUP = 1;
const bit<16> RECIRCULATE_RID = 255;
#define FIELDS_SERVING 1

struct meta_t {
    // settings
    bit<8> enabled;
    bit<32> lease_ticks;
    bit<32> heat_threshold;
    // the packet
    bit<32> now;                // ticks of 64 us
    bit<8> well_formed;
    bit<8> decision;
    bit<8> fill;
    // forwarding
    bit<8> route;
    bit<9> egress_port;
    bit<32> egress_bit;
    // the sender
    bit<8> admitted;
    bit<32> port_bit;
    bit<32> group_bits;
    bit<16> group_serve_group;
    // resident
    bit<8> resident;
    bit<32> slot;
    bit<32> generation;
    bit<64> chunk_mask;
    bit<64> resident_digest;
    bit<32> resident_size;
    bit<64> valid;
    bit<64> chunk_bit;
    // pending
    bit<16> pending_index;
    bit<32> fingerprint;
    bit<8> pending;
    bit<32> waiting;            // ports that waited before this packet
    bit<32> own;                // the reader's own bit among them
    bit<8> coalesce;            // the frame may touch the pending table
    bit<8> clear;               // and ends the wait
    // egress
    bit<8> copy;
    bit<8> rewritten;
    // what a served READ keeps from one pass to the next
    @field_list(FIELDS_SERVING) bit<8> serving;
    @field_list(FIELDS_SERVING) bit<32> reader_bits;
    @field_list(FIELDS_SERVING) bit<16> serve_group;
    bit<32> copy_bits;
}

// To the controller, once a window for a segment that is read often and is not resident.
struct heat_t {
    bit<16> namespace;
    bit<16> segment;
    bit<128> key;
    bit<32> port_bits;          // ports that wait for it now, the reader's included
    bit<32> reader_bit;
    bit<32> count;              // READs in this window, at least; the sketch overestimates
}

#endif
