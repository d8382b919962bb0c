// The headers that the TNA program parses. round_h is its own: it is in front of a frame between
// ingress and egress, and while the frame goes round.

#ifndef KVCAST_HEADERS_TNA_P4_
#define KVCAST_HEADERS_TNA_P4_

#include "../generated/kvcast_headers.p4"
#include "../generated/roce.p4"
#include "../generated/tna.p4"
#include "cell_words.p4"

struct headers_t {
    round_h    round;
    ethernet_h ethernet;
    ipv4_h     ipv4;
    udp_h      udp;
    kvcast_h   kvcast;
    bth_h      bth;
    write_h    write;
    row_head_h row_head;    // the words that every row has
    row_tail_h row_tail;    // the words that the last row lacks
}

#endif
