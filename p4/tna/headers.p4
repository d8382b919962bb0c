// The headers that the TNA program parses, and the one that it puts in front of a frame between
// ingress and egress, and on its way round.

#ifndef KVCAST_HEADERS_TNA_P4_
#define KVCAST_HEADERS_TNA_P4_

#include "../generated/kvcast_headers.p4"
#include "cell_words.p4"

// What a frame is that comes in by the recirculation port. Hosts cannot send there.
const bit<8> TASK_NONE   = 0;  // leaves the switch, or came from outside
const bit<8> TASK_NEXT   = 1;  // a READ on its way to its next chunk
const bit<8> TASK_GATHER = 2;  // a READ that collects one chunk, row by row, the last row first
const bit<8> TASK_STORE  = 3;  // DATA that leaves one chunk, row by row, the first row first

// In front of every frame between ingress and egress; stays there when the frame goes round.
header round_h {
    bit<8>  task;           // of this frame; egress gives `again` to the copy of rid 255
    bit<8>  again;
    bit<8>  delivery;       // DELIVER_*
    bit<8>  row;            // of the cell, to be read or written next
    bit<16> index;          // of that row in the cells' registers
    bit<8>  bank;           // of the cells
    bit<8>  rewritten;      // 1: the IPv4 checksum must be made anew
    bit<8>  last;           // 1: no chunk comes after this one
    bit<16> serve_group;
    @padding
    bit<7>  unused;
    bit<9>  ingress_port;   // flooding leaves it out
    bit<32> port_bits;
    bit<32> generation;
}

struct headers_t {
    round_h    round;
    ethernet_h ethernet;
    ipv4_h     ipv4;
    udp_h      udp;
    kvcast_h   kvcast;
    row_head_h row_head;    // the words that every row has
    row_tail_h row_tail;    // the words that the last row lacks
}

#endif
