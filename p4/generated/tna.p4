// Generated from p4/definitions.py by `python -m kvcast.p4.generate`; do not edit.

#ifndef KVCAST_GENERATED_TNA_P4_
#define KVCAST_GENERATED_TNA_P4_

// What a frame is that comes in by a Tofino's recirculation port, where no host can send.
const bit<8> TASK_NONE = 0x00;            // leaves the switch, or came from outside
const bit<8> TASK_NEXT = 0x01;            // a READ on its way to its next chunk
const bit<8> TASK_GATHER = 0x02;          // a READ that collects one chunk, row by row, the last row first
const bit<8> TASK_STORE = 0x03;           // DATA that leaves one chunk, row by row, the first row first

// What a Tofino's stateful ALU says of a pending entry by its two comparisons.
const bit<8> OTHER_FRESH = 0x01;          // another segment's, or free; within its lease
const bit<8> MINE_FRESH = 0x02;           // this segment's, within its lease
const bit<8> OTHER_STALE = 0x04;          // another segment's, or free; past its lease
const bit<8> MINE_STALE = 0x08;           // this segment's, past its lease

// Groups 64 to 67, one a pipe: {its recirculation port, RECIRCULATE_RID}.
const bit<16> LOOP_GROUP = 0x0040;
// The digest type of a heat message.
const bit<3> HEAT_DIGEST = 1;

// In front of every frame between ingress and egress; stays there when the frame goes round.
header round_h {
    bit<8> task;            // of this frame; egress gives `again` to the copy of RECIRCULATE_RID
    bit<8> again;
    bit<8> delivery;        // DELIVER_*
    bit<8> row;             // of the cell, to be read or written next
    bit<16> index;          // of that row in the cells' registers
    bit<8> bank;            // of the cells
    bit<8> rewritten;       // 1: the IPv4 checksum must be made anew
    bit<8> last;            // 1: no chunk comes after this one
    bit<16> serve_group;
    @padding
    bit<7> unused;
    bit<9> ingress_port;    // flooding leaves it out
    bit<32> port_bits;
    bit<32> generation;
}

#endif
