// The headers that v1model parses: every part of a frame that the program may change.

#ifndef KVCAST_HEADERS_V1MODEL_P4_
#define KVCAST_HEADERS_V1MODEL_P4_

#include "../generated/kvcast_headers.p4"

struct headers_t {
    ethernet_h     ethernet;
    ipv4_h         ipv4;
    udp_h          udp;
    kvcast_h       kvcast;
    cell_h         cell;         // DATA's chunk
    bth_h          bth;          // RoCE
    write_h        write;        // an RDMA WRITE with an immediate
    read_padding_h padding;      // what a PADDED READ brings, so that a target may grow it
}

#endif
