// Generated from protocol/messages/roce.py by `python -m kvcast.p4.generate`; do not edit.

#ifndef KVCAST_GENERATED_ROCE_P4_
#define KVCAST_GENERATED_ROCE_P4_

const bit<16> ROCE_UDP_PORT = 0x12b7;
const bit<8> UC_WRITE_ONLY_WITH_IMMEDIATE = 0x2b;
const bit<32> POOL_KEY = 0x4b56434b;      // of a packet that is for whoever waits
// A chunk's address in a landing zone: the upper half, and bits of the lower that are 0.
const bit<32> ZONE_ADDRESS_HIGH = 0x00004b56;
const bit<16> ADDRESS_MID_ZEROS = 0xfe00;
const bit<16> ADDRESS_LOW_ZEROS = 0x0fff;
const bit<2> WRITE_CHUNK_CODE = 0x2;

// InfiniBand's base transport header, behind UDP port 4791
header bth_h {
    bit<8> opcode;
    bit<8> flags;           // solicited event, migration, padding, version
    bit<16> partition;
    bit<8> notices;         // FECN, BECN
    bit<24> queue_pair;     // of the receiver
    bit<8> ask_ack;
    bit<24> psn;            // UC takes an ONLY at any
}

// RETH and immediate of a UC RDMA WRITE ONLY WITH IMMEDIATE
header write_h {
    bit<32> address_high;   // ZONE_ADDRESS_HIGH
    bit<16> address_mid;    // slot << 2 | upper two bits of the chunk
    bit<16> address_low;    // lower four bits of the chunk, and 0
    bit<32> key;
    bit<32> size;           // bytes that are written
    bit<16> immediate_high; // namespace ^ address_mid
    bit<16> immediate_low;  // index ^ address_low
}

#endif
